// Control and Models: codes and texts of every refusal, and the numbers of what is kept.
#include <algorithm>
#include <filesystem>

#include "tests/service/server_fixture.h"

namespace kvstow {
namespace {

using ::testing::HasSubstr;

class ServerControl : public ::kvstow::testing::ServerFixture {
 protected:
  void SetUp() override {
    Start();
    model_ = Register(SmallSpec());
    rows_ = MakeRows(*model_, 1);
  }

  std::string Fingerprint() const { return std::string(model_->fingerprint().AsStringView()); }

  static void ExpectError(const grpc::Status& status, grpc::StatusCode code,
                          const std::string& text) {
    EXPECT_EQ(status.error_code(), code);
    EXPECT_EQ(status.error_message(), text);
  }

  grpc::Status CallLookup(const v1::LookupRequest& request, v1::LookupResponse* response) {
    grpc::ClientContext context;
    return control_->Lookup(&context, request, response);
  }

  v1::TokenPrefix* SetPrefix(v1::LookupRequest& request, int num_tokens) {
    v1::TokenPrefix* prefix = request.mutable_prefix();
    prefix->mutable_context()->set_fingerprint(Fingerprint());
    for (int i = 0; i < num_tokens; ++i) prefix->add_token_ids(i % 1000);
    return prefix;
  }

  grpc::Status CallReserve(const v1::ReserveRequest& request) {
    grpc::ClientContext context;
    v1::ReserveResponse response;
    return control_->Reserve(&context, request, &response);
  }

  grpc::Status CallAcquire(const std::vector<BlockKey>& keys, uint32_t ttl_ms,
                           v1::AcquireResponse* response) {
    v1::AcquireRequest request;
    request.set_keys(KeysToBytes(keys));
    request.set_ttl_ms(ttl_ms);
    grpc::ClientContext context;
    return control_->Acquire(&context, request, response);
  }

  grpc::Status CallRelease(uint64_t lease) {
    v1::ReleaseRequest request;
    request.set_lease(lease);
    v1::ReleaseResponse response;
    grpc::ClientContext context;
    return control_->Release(&context, request, &response);
  }

  grpc::Status CallList(const v1::ListRequest& request, v1::ListResponse* response) {
    grpc::ClientContext context;
    return control_->List(&context, request, response);
  }

  grpc::Status CallVerify(const std::vector<BlockKey>& keys,
                          std::vector<v1::VerifyProgress>* progress) {
    v1::VerifyRequest request;
    request.set_keys(KeysToBytes(keys));
    grpc::ClientContext context;
    const auto reader = control_->Verify(&context, request);
    v1::VerifyProgress message;
    while (reader->Read(&message)) progress->push_back(message);
    return reader->Finish();
  }

  ModelRef model_;
  std::vector<std::string> rows_;
};

// --- models ---

TEST_F(ServerControl, RegisteringAgainGivesTheSameFingerprint) {
  EXPECT_EQ(Register(SmallSpec())->fingerprint(), model_->fingerprint());
  v1::ListModelsResponse response;
  grpc::ClientContext context;
  ASSERT_TRUE(models_->ListModels(&context, {}, &response).ok());
  EXPECT_EQ(response.specs_size(), 1);
}

TEST_F(ServerControl, RegistrationTellsTheSizeOfABlock) {
  v1::RegisterModelRequest request;
  *request.mutable_spec() = ModelSpecToProto(SmallSpec());
  v1::RegisterModelResponse response;
  grpc::ClientContext context;
  ASSERT_TRUE(models_->RegisterModel(&context, request, &response).ok());
  EXPECT_EQ(response.num_planes(), 8u);
  EXPECT_EQ(response.block_bytes(), 32768u);
}

TEST_F(ServerControl, BadModelsAreRefusedByField) {
  v1::ModelSpec zero_heads = ModelSpecToProto(SmallSpec());
  zero_heads.mutable_groups(0)->set_num_kv_heads(0);
  v1::ModelSpec gap = ModelSpecToProto(SmallSpec());
  *gap.add_groups() = gap.groups(0);
  gap.mutable_groups(1)->set_first_layer(3);
  v1::ModelSpec overlap = gap;
  overlap.mutable_groups(1)->set_first_layer(1);
  v1::ModelSpec kind = ModelSpecToProto(SmallSpec());
  kind.mutable_groups(0)->set_kind(static_cast<v1::LayerKind>(17));
  const std::vector<std::pair<v1::ModelSpec, std::string>> cases = {
      {zero_heads, "model spec: groups[0].num_kv_heads is 0, want 1 to 1024"},
      {gap, "model spec: groups[1].first_layer is 3, want 2: layers are missing"},
      {overlap, "model spec: groups[1].first_layer is 1, want 2: layers overlap"},
      {kind, "groups[0].kind: 17, want full (1), sliding (2), mla (3) or opaque (4)"},
  };
  for (const auto& [spec, text] : cases) {
    v1::RegisterModelRequest request;
    *request.mutable_spec() = spec;
    v1::RegisterModelResponse response;
    grpc::ClientContext context;
    ExpectError(models_->RegisterModel(&context, request, &response),
                grpc::StatusCode::INVALID_ARGUMENT, text);
  }
}

TEST_F(ServerControl, GetModelFindsWhatWasRegistered) {
  v1::GetModelRequest request;
  request.set_fingerprint(Fingerprint());
  v1::GetModelResponse response;
  {
    grpc::ClientContext context;
    ASSERT_TRUE(models_->GetModel(&context, request, &response).ok());
    EXPECT_EQ(*ModelSpecFromProto(response.spec()), SmallSpec());
  }
  request.set_fingerprint("short");
  grpc::ClientContext context;
  ExpectError(models_->GetModel(&context, request, &response), grpc::StatusCode::INVALID_ARGUMENT,
              "fingerprint is 5 bytes, want 32");
}

// --- lookup ---

TEST_F(ServerControl, LookupCountsLeadingBlocksAndGivesEachPlace) {
  Store(model_, Key(0), rows_, "raw");
  Store(model_, Key(1), rows_, "raw");
  Store(model_, Key(3), rows_, "raw");
  const v1::LookupResponse response = Lookup({Key(0), Key(1), Key(2), Key(3)});
  EXPECT_EQ(response.num_leading(), 2u);
  EXPECT_EQ(response.locations(), std::string("\1\1\0\1", 4));
  EXPECT_TRUE(response.keys().empty());
}

TEST_F(ServerControl, LookupByTokensFindsFullBlocksOnly) {
  v1::LookupRequest request;
  SetPrefix(request, 100);  // three blocks of 32 and four tokens more
  v1::LookupResponse response;
  ASSERT_TRUE(CallLookup(request, &response).ok());
  const std::vector<BlockKey> keys = *KeysFromBytes(response.keys(), "keys", 0);
  ASSERT_EQ(keys.size(), 3u);
  EXPECT_EQ(response.num_leading(), 0u);
  std::vector<int32_t> tokens(request.prefix().token_ids().begin(),
                              request.prefix().token_ids().end());
  EXPECT_EQ(keys, ChainKeys({.fingerprint = model_->fingerprint()}, tokens, 32));
  Store(model_, keys[0], rows_, "raw");
  Store(model_, keys[1], rows_, "raw");
  ASSERT_TRUE(CallLookup(request, &response).ok());
  EXPECT_EQ(response.num_leading(), 2u);
}

TEST_F(ServerControl, LookupOfOneTokenIsNoBlockAndNoError) {
  v1::LookupRequest request;
  SetPrefix(request, 1);
  v1::LookupResponse response;
  ASSERT_TRUE(CallLookup(request, &response).ok());
  EXPECT_EQ(response.locations(), "");
}

TEST_F(ServerControl, LookupsOutOfRangeAreRefusedWithNumbers) {
  v1::LookupResponse response;
  v1::LookupRequest request;
  ExpectError(CallLookup(request, &response), grpc::StatusCode::INVALID_ARGUMENT,
              "lookup: neither keys nor prefix is set");
  request.set_keys("");
  ExpectError(CallLookup(request, &response), grpc::StatusCode::INVALID_ARGUMENT,
              "keys: 0 keys, want 1 to 65536");
  request.set_keys(std::string(65537 * 32, 'k'));
  ExpectError(CallLookup(request, &response), grpc::StatusCode::INVALID_ARGUMENT,
              "keys: 65537 keys, want 1 to 65536");
  SetPrefix(request, 0);
  ExpectError(CallLookup(request, &response), grpc::StatusCode::INVALID_ARGUMENT,
              "prefix.token_ids: 0 tokens, want 1 to 1048576");
  SetPrefix(request, 1048577);
  ExpectError(CallLookup(request, &response), grpc::StatusCode::INVALID_ARGUMENT,
              "prefix.token_ids: 1048577 tokens, want 1 to 1048576");
}

TEST_F(ServerControl, LookupsAtTheLimitAreAnswered) {
  v1::LookupRequest request;
  request.set_keys(std::string(65536 * 32, 'k'));
  v1::LookupResponse response;
  ASSERT_TRUE(CallLookup(request, &response).ok());
  EXPECT_EQ(response.locations(), std::string(65536, '\0'));
  SetPrefix(request, 1048576);
  ASSERT_TRUE(CallLookup(request, &response).ok());
  EXPECT_EQ(response.locations().size(), 32768u);
}

// More than the largest message: gRPC refuses it before we see it, at once and without memory.
TEST_F(ServerControl, LookupOfTenMillionKeysIsResourceExhausted) {
  v1::LookupRequest request;
  request.set_keys(std::string(size_t{10'000'000} * 32, 'k'));
  v1::LookupResponse response;
  const grpc::Status status = CallLookup(request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("larger than max"));
}

TEST_F(ServerControl, UnregisteredModelIsNotFound) {
  ModelSpec other = SmallSpec();
  other.name = "other";
  const Digest fingerprint = other.Fingerprint();
  const std::string text =
      absl::StrCat("model ", fingerprint.ToHex(), " is not registered: call RegisterModel first");
  v1::LookupRequest lookup;
  SetPrefix(lookup, 32)
      ->mutable_context()
      ->set_fingerprint(std::string(fingerprint.AsStringView()));
  v1::LookupResponse response;
  ExpectError(CallLookup(lookup, &response), grpc::StatusCode::NOT_FOUND, text);
  v1::ReserveRequest reserve;
  reserve.set_fingerprint(std::string(fingerprint.AsStringView()));
  reserve.set_form(v1::FORM_ROWS);
  reserve.add_blocks();
  ExpectError(CallReserve(reserve), grpc::StatusCode::NOT_FOUND, text);
}

// --- reserve, seal, abort ---

TEST_F(ServerControl, SecondWriterIsToldAlreadyExists) {
  const uint64_t ticket = Reserve(model_, Key(1), "raw");
  const v1::ReserveResult during = ReserveItem(model_, Key(1), "int8");
  EXPECT_EQ(during.status().code(), grpc::StatusCode::ALREADY_EXISTS);
  EXPECT_EQ(during.status().message(), absl::StrCat("block ", Key(1).ToHex(), " is being written"));
  EXPECT_EQ(during.ticket(), 0u);
  PutOne({RowsFrame(ticket, 0, rows_)});
  Seal(ticket);
  const v1::ReserveResult after = ReserveItem(model_, Key(1), "int8");
  EXPECT_EQ(after.status().code(), grpc::StatusCode::ALREADY_EXISTS);
  EXPECT_EQ(after.status().message(), absl::StrCat("block ", Key(1).ToHex(), " is sealed already"));
}

TEST_F(ServerControl, BlocksOfAReserveAnswerForThemselves) {
  v1::ReserveRequest request;
  request.set_fingerprint(Fingerprint());
  request.set_form(v1::FORM_ROWS);
  for (const auto& [key, codec] : std::vector<std::pair<std::string, std::string>>{
           {"short", "raw"},
           {std::string(Key(1).AsStringView()), "tq5"},
           {std::string(Key(2).AsStringView()), "safe"},
           {std::string(Key(3).AsStringView()), "k=tq4,v=tqm4"},
           {std::string(Key(4).AsStringView()), "k=tqm4,v=tq4"}}) {
    v1::ReserveBlock* block = request.add_blocks();
    block->set_key(key);
    block->set_codec(codec);
  }
  v1::ReserveResponse response;
  grpc::ClientContext context;
  ASSERT_TRUE(control_->Reserve(&context, request, &response).ok());
  ASSERT_EQ(response.results_size(), 5);
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(response.results(i).status().code(), grpc::StatusCode::INVALID_ARGUMENT) << i;
    EXPECT_EQ(response.results(i).ticket(), 0u);
  }
  EXPECT_EQ(response.results(0).status().message(), "key is 5 bytes, want 32");
  EXPECT_THAT(response.results(1).status().message(), HasSubstr("codec: "));
  EXPECT_THAT(response.results(1).status().message(), HasSubstr("tq5"));
  EXPECT_EQ(response.results(2).status().message(),
            "codec: preset \"safe\", want codecs, such as \"k=tqm4,v=tq4\": the client resolves "
            "presets");
  EXPECT_THAT(response.results(3).status().message(), HasSubstr("tqm4"));
  EXPECT_EQ(response.results(4).status().code(), 0);
  EXPECT_NE(response.results(4).ticket(), 0u);
}

TEST_F(ServerControl, ReservesOutOfRangeAreRefused) {
  v1::ReserveRequest request;
  request.set_fingerprint(Fingerprint());
  request.set_form(v1::FORM_ROWS);
  ExpectError(CallReserve(request), grpc::StatusCode::INVALID_ARGUMENT,
              "blocks: 0, want 1 to 4096");
  for (int i = 0; i < 4097; ++i) request.add_blocks();
  ExpectError(CallReserve(request), grpc::StatusCode::INVALID_ARGUMENT,
              "blocks: 4097, want 1 to 4096");
  request.clear_blocks();
  request.add_blocks();
  request.set_form(v1::FORM_UNSPECIFIED);
  ExpectError(CallReserve(request), grpc::StatusCode::INVALID_ARGUMENT,
              "form: 0, want rows (1) or encoded (2)");
}

TEST_F(ServerControl, BlockLargerThanMemoryIsRefusedForGood) {
  ModelSpec spec = LargeSpec();
  spec.groups[0].num_layers = 512;  // 64 MiB a block
  const v1::ReserveResult result = ReserveItem(Register(spec), Key(1), "raw");
  EXPECT_EQ(result.status().code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(result.status().message(), HasSubstr("memory holds"));
}

TEST_F(ServerControl, FullMemoryIsResourceExhaustedWithAHint) {
  const ModelRef large = Register(LargeSpec());  // 2 MiB a block, 32 MiB of memory
  int num_reserved = 0;
  v1::ReserveResult result;
  for (; num_reserved < 20; ++num_reserved) {
    result = ReserveItem(large, Key(num_reserved), "raw");
    if (result.status().code() != 0) break;
  }
  EXPECT_GE(num_reserved, 14);
  EXPECT_EQ(result.status().code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(result.status().message(), HasSubstr("bytes wanted"));
  EXPECT_EQ(result.status().retry_after_ms(), 100u);
}

TEST_F(ServerControl, SealTwiceSealAfterAbortAbortAfterSealUnknownTickets) {
  const uint64_t sealed = Reserve(model_, Key(1), "raw");
  PutOne({RowsFrame(sealed, 0, rows_)});
  EXPECT_EQ(Seal(sealed).code(), 0);
  const v1::ItemStatus twice = Seal(sealed);
  EXPECT_EQ(twice.code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(twice.message(), absl::StrCat("ticket ", sealed, " is sealed"));
  EXPECT_EQ(Abort(sealed).code(), grpc::StatusCode::FAILED_PRECONDITION);
  const uint64_t aborted = Reserve(model_, Key(2), "raw");
  EXPECT_EQ(Abort(aborted).code(), 0);
  const v1::ItemStatus seal_after_abort = Seal(aborted);
  EXPECT_EQ(seal_after_abort.code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(seal_after_abort.message(), absl::StrCat("ticket ", aborted, " was aborted"));
  EXPECT_EQ(Abort(aborted).code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(Seal(42).code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(Seal(42).message(), "no ticket 42");
  EXPECT_EQ(Abort(42).code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(Lookup({Key(1), Key(2)}).num_leading(), 1u);
}

TEST_F(ServerControl, ThousandAbortsGiveAllBytesBack) {
  const uint64_t used = Stat().tiers(0).used_bytes();
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(Abort(Reserve(model_, Key(i), "raw")).code(), 0);
  const v1::StatResponse stat = Stat();
  EXPECT_EQ(stat.tiers(0).used_bytes(), used);
  EXPECT_EQ(stat.tiers(0).reserved_bytes(), 0u);
  EXPECT_EQ(stat.open_tickets(), 0u);
  EXPECT_EQ(stat.counters().at("aborts"), 1000u);
}

TEST_F(ServerControl, SealAndAbortOutOfRangeAreRefused) {
  v1::SealRequest seal;
  v1::SealResponse sealed;
  {
    grpc::ClientContext context;
    ExpectError(control_->Seal(&context, seal, &sealed), grpc::StatusCode::INVALID_ARGUMENT,
                "tickets: 0, want 1 to 4096");
  }
  v1::AbortRequest abort;
  for (int i = 0; i < 4097; ++i) abort.add_tickets(1);
  v1::AbortResponse aborted;
  grpc::ClientContext context;
  ExpectError(control_->Abort(&context, abort, &aborted), grpc::StatusCode::INVALID_ARGUMENT,
              "tickets: 4097, want 1 to 4096");
}

TEST_F(ServerControl, DurableSealWithoutADiskIsRefusedAndSealsNothing) {
  const uint64_t ticket = Reserve(model_, Key(1), "raw");
  PutOne({RowsFrame(ticket, 0, rows_)});
  v1::SealRequest request;
  request.add_tickets(ticket);
  request.set_durable(true);
  v1::SealResponse response;
  grpc::ClientContext context;
  ExpectError(control_->Seal(&context, request, &response), grpc::StatusCode::FAILED_PRECONDITION,
              "durable: this service has no disk tier (nvme.path is empty)");
  EXPECT_EQ(Lookup({Key(1)}).num_leading(), 0u);
  EXPECT_EQ(Seal(ticket).code(), 0);
}

// --- leases ---

TEST_F(ServerControl, LeaseHoldsWhatIsPresentUntilReleasedOnce) {
  Store(model_, Key(1), rows_, "raw");
  v1::AcquireResponse lease;
  ASSERT_TRUE(CallAcquire({Key(0), Key(1)}, 1000, &lease).ok());
  EXPECT_NE(lease.lease(), 0u);
  EXPECT_EQ(lease.held(), std::string("\0\1", 2));
  EXPECT_EQ(lease.ttl_ms(), 1000u);
  EXPECT_EQ(Stat().open_leases(), 1u);
  EXPECT_TRUE(CallRelease(lease.lease()).ok());
  ExpectError(CallRelease(lease.lease()), grpc::StatusCode::NOT_FOUND,
              absl::StrCat("no lease ", lease.lease(), ": unknown, expired or released already"));
  EXPECT_EQ(Stat().open_leases(), 0u);
  ExpectError(CallRelease(7), grpc::StatusCode::NOT_FOUND,
              "no lease 7: unknown, expired or released already");
}

TEST_F(ServerControl, LeaseOnNothingIsZero) {
  v1::AcquireResponse lease;
  ASSERT_TRUE(CallAcquire({Key(0)}, 1000, &lease).ok());
  EXPECT_EQ(lease.lease(), 0u);
  EXPECT_EQ(lease.held(), std::string(1, '\0'));
}

TEST_F(ServerControl, LeaseEndsAtItsDeadline) {
  Store(model_, Key(1), rows_, "raw");
  v1::AcquireResponse lease;
  ASSERT_TRUE(CallAcquire({Key(1)}, 1000, &lease).ok());
  clock_.Advance(absl::Milliseconds(1001));
  EXPECT_EQ(CallRelease(lease.lease()).error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(ServerControl, LeasesOutOfRangeAreRefused) {
  v1::AcquireResponse lease;
  ExpectError(CallAcquire({}, 1000, &lease), grpc::StatusCode::INVALID_ARGUMENT,
              "keys: 0 keys, want 1 to 65536");
  ExpectError(CallAcquire({Key(1)}, 0, &lease), grpc::StatusCode::INVALID_ARGUMENT,
              "ttl_ms: 0, want 1 to 300000");
  ExpectError(CallAcquire({Key(1)}, 300001, &lease), grpc::StatusCode::INVALID_ARGUMENT,
              "ttl_ms: 300001, want 1 to 300000");
  EXPECT_TRUE(CallAcquire({Key(1)}, 300000, &lease).ok());
}

// --- delete, list, stat, verify ---

TEST_F(ServerControl, DeleteForgetsAndCounts) {
  Store(model_, Key(1), rows_, "raw");
  Store(model_, Key(2), rows_, "raw");
  v1::DeleteRequest request;
  request.set_keys(KeysToBytes(std::vector<BlockKey>{Key(0), Key(1)}));
  v1::DeleteResponse response;
  grpc::ClientContext context;
  ASSERT_TRUE(control_->Delete(&context, request, &response).ok());
  EXPECT_EQ(response.num_deleted(), 1u);
  EXPECT_EQ(Lookup({Key(1), Key(2)}).locations(), std::string("\0\1", 2));
}

TEST_F(ServerControl, ListGivesEveryBlockOnceInOrderOfKeys) {
  ModelSpec other_spec = SmallSpec();
  other_spec.name = "other";
  const ModelRef other = Register(other_spec);
  std::vector<BlockKey> keys;
  for (int i = 0; i < 10; ++i) {
    keys.push_back(Key(i));
    Store(i % 5 == 0 ? other : model_, Key(i), rows_, i % 2 == 0 ? "raw" : "int8");
  }
  std::sort(keys.begin(), keys.end());
  for (const uint32_t page_size : {1u, 3u, 5u, 10u, 11u, 0u}) {
    std::vector<BlockKey> listed;
    v1::ListRequest request;
    request.set_page_size(page_size);
    int num_pages = 0;
    do {
      v1::ListResponse response;
      ASSERT_TRUE(CallList(request, &response).ok());
      for (const v1::BlockInfo& block : response.blocks()) {
        listed.push_back(*Digest::FromBytes(block.key(), "key"));
      }
      request.set_page_token(response.next_page_token());
      ++num_pages;
    } while (!request.page_token().empty());
    EXPECT_EQ(listed, keys) << page_size;
    const int per_page = page_size == 0 ? 1000 : static_cast<int>(page_size);
    EXPECT_EQ(num_pages, (10 + per_page - 1) / per_page) << page_size;
  }
  v1::ListRequest request;
  request.set_fingerprint(std::string(other->fingerprint().AsStringView()));
  request.set_page_size(1);
  int num_found = 0;
  do {
    v1::ListResponse response;
    ASSERT_TRUE(CallList(request, &response).ok());
    num_found += response.blocks_size();
    request.set_page_token(response.next_page_token());
  } while (!request.page_token().empty());
  EXPECT_EQ(num_found, 2);
}

TEST_F(ServerControl, ListTellsWhatABlockIs) {
  Store(model_, Key(1), rows_, "k=tqm4,v=tq4");
  v1::ListResponse response;
  ASSERT_TRUE(CallList({}, &response).ok());
  ASSERT_EQ(response.blocks_size(), 1);
  const v1::BlockInfo& block = response.blocks(0);
  EXPECT_EQ(block.fingerprint(), Fingerprint());
  EXPECT_EQ(block.codec(), "k=tqm4,v=tq4");
  EXPECT_EQ(block.locations(), static_cast<uint32_t>(v1::LOCATION_DRAM));
  EXPECT_EQ(block.num_tokens(), 32u);
  EXPECT_EQ(block.logical_bytes(), 32768u);
  EXPECT_EQ(block.record_bytes(), server_->store().Get(Key(1))->bytes().size());
  EXPECT_FALSE(block.is_pinned());
}

TEST_F(ServerControl, QuantizedInputIsShownAsRaw) {
  const ModelRef fp8 = Register(SmallSpec(DType::kF8E4M3));
  std::vector<std::string> rows;
  for (int i = 0; i < 8; ++i) rows.push_back(std::string(2048, static_cast<char>(0x7f + i)));
  Store(fp8, Key(1), rows, "k=tqm4,v=tq4");
  v1::ListResponse response;
  ASSERT_TRUE(CallList({}, &response).ok());
  EXPECT_EQ(response.blocks(0).codec(), "raw");
  EXPECT_EQ(Get({Key(1)}, v1::FORM_ROWS)[0].units, rows);
  EXPECT_EQ(Stat().counters().at("raw_fallback_units"), 0u);
}

TEST_F(ServerControl, ListsOutOfRangeAreRefused) {
  v1::ListResponse response;
  v1::ListRequest request;
  request.set_page_size(10001);
  ExpectError(CallList(request, &response), grpc::StatusCode::INVALID_ARGUMENT,
              "page_size: 10001, want at most 10000");
  request.set_page_size(1);
  request.set_page_token("no token");
  ExpectError(CallList(request, &response), grpc::StatusCode::INVALID_ARGUMENT,
              "page_token: not one that List gave");
  request.set_page_token("");
  request.set_fingerprint("short");
  ExpectError(CallList(request, &response), grpc::StatusCode::INVALID_ARGUMENT,
              "fingerprint is 5 bytes, want 32");
}

TEST_F(ServerControl, StatEqualsTheSumOfTheRecords) {
  for (int i = 0; i < 6; ++i) Store(model_, Key(i), rows_, i % 2 == 0 ? "raw" : "int8");
  Reserve(model_, Key(100), "raw");
  v1::ListResponse list;
  ASSERT_TRUE(CallList({}, &list).ok());
  uint64_t record_bytes = 0;
  for (const v1::BlockInfo& block : list.blocks()) record_bytes += block.record_bytes();
  const v1::StatResponse stat = Stat();
  ASSERT_EQ(stat.tiers_size(), 1);
  EXPECT_EQ(stat.tiers(0).tier(), "dram");
  EXPECT_EQ(stat.tiers(0).capacity_bytes(), uint64_t{32} << 20);
  EXPECT_EQ(stat.tiers(0).sealed_bytes(), record_bytes);
  EXPECT_GT(stat.tiers(0).reserved_bytes(), 32768u);
  EXPECT_GE(stat.tiers(0).used_bytes(), record_bytes + stat.tiers(0).reserved_bytes());
  EXPECT_EQ(stat.tiers(0).num_blocks(), 6u);
  EXPECT_EQ(stat.num_blocks(), 6u);
  EXPECT_EQ(stat.open_tickets(), 1u);
  ASSERT_EQ(stat.codecs_size(), 2);
  uint64_t codec_bytes = 0;
  for (const v1::CodecStat& codec : stat.codecs()) {
    EXPECT_EQ(codec.num_blocks(), 3u);
    EXPECT_EQ(codec.logical_bytes(), 3u * 32768);
    codec_bytes += codec.record_bytes();
  }
  EXPECT_EQ(codec_bytes, record_bytes);
  EXPECT_EQ(stat.counters().at("seals"), 6u);
  EXPECT_EQ(stat.counters().at("put_rows_bytes"), 6u * 32768);
  EXPECT_EQ(stat.version(), "0.1.0");
  EXPECT_GT(stat.resident_bytes(), uint64_t{32} << 20);
}

TEST_F(ServerControl, VerifyWalksEverythingInSteps) {
  for (int i = 0; i < 150; ++i) Store(model_, Key(i), rows_, "int8");
  std::vector<v1::VerifyProgress> progress;
  ASSERT_TRUE(CallVerify({}, &progress).ok());
  ASSERT_EQ(progress.size(), 3u);
  EXPECT_EQ(progress[0].num_checked(), 64u);
  EXPECT_EQ(progress[0].num_total(), 150u);
  EXPECT_FALSE(progress[0].done());
  EXPECT_EQ(progress[2].num_checked(), 150u);
  EXPECT_TRUE(progress[2].done());
}

TEST_F(ServerControl, VerifyNamesAndDropsBadBlocks) {
  for (int i = 0; i < 3; ++i) Store(model_, Key(i), rows_, "int8");
  {
    const BlockRef block = *server_->store().Get(Key(1));
    // A test plays bad memory; nothing else may write here.
    const_cast<std::byte&>(block.bytes()[block.bytes().size() - 1]) ^= std::byte{1};
  }
  std::vector<v1::VerifyProgress> progress;
  ASSERT_TRUE(CallVerify({Key(0), Key(1), Key(2), Key(77)}, &progress).ok());
  ASSERT_EQ(progress.size(), 1u);
  EXPECT_EQ(progress[0].num_checked(), 4u);
  ASSERT_EQ(progress[0].bad_keys_size(), 1);
  EXPECT_EQ(progress[0].bad_keys(0), std::string(Key(1).AsStringView()));
  EXPECT_EQ(Lookup({Key(0), Key(1), Key(2)}).locations(), std::string("\1\0\1", 3));
  progress.clear();
  ASSERT_TRUE(CallVerify({}, &progress).ok());
  EXPECT_EQ(progress[0].num_checked(), 2u);
  EXPECT_EQ(progress[0].bad_keys_size(), 0);
}

TEST_F(ServerControl, VerifyOfNothingIsDoneAtOnce) {
  std::vector<v1::VerifyProgress> progress;
  ASSERT_TRUE(CallVerify({}, &progress).ok());
  ASSERT_EQ(progress.size(), 1u);
  EXPECT_TRUE(progress[0].done());
}

}  // namespace
}  // namespace kvstow
