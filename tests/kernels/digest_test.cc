// SHA-256 digests: published vectors, the field encoding, and reading them back.
#include "kernels/core/digest.h"

#include <string>

#include "gtest/gtest.h"

namespace kvstow {
namespace {

// FIPS 180-4 examples and the empty message.
TEST(Sha256, GivesTheVectorsOfFips180) {
  EXPECT_EQ(Sha256("").ToHex(), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(Sha256("abc").ToHex(),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(Sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq").ToHex(),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(Sha256(std::string(1000000, 'a')).ToHex(),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

// Computed with another implementation: SHA-256 over length-prefixed "domain", "abc", 5, {7, -1}.
TEST(DigestBuilder, PrefixesEveryFieldWithItsLength) {
  const int32_t tokens[] = {7, -1};
  EXPECT_EQ(DigestBuilder("domain").Add("abc").AddU64(5).AddTokens(tokens).Finish().ToHex(),
            "6877edbd1dffa0fb42fa9e2bf6825f32462dab720068b98d74a1464b0fd52ebb");
}

TEST(DigestBuilder, MovingABoundaryBetweenFieldsChangesTheDigest) {
  const auto digest = [](std::string_view a, std::string_view b) {
    return DigestBuilder("d").Add(a).Add(b).Finish();
  };
  EXPECT_NE(digest("ab", "c"), digest("a", "bc"));
  EXPECT_NE(digest("", "abc"), digest("abc", ""));
  EXPECT_NE(DigestBuilder("d").Add("a").Finish(), DigestBuilder("da").Finish());
  EXPECT_NE(DigestBuilder("d").Add("").Finish(), DigestBuilder("d").Finish());
}

TEST(Digest, HexIsReadBackInBothCases) {
  const Digest digest = Sha256("x");
  EXPECT_EQ(*Digest::FromHex(digest.ToHex()), digest);
  std::string upper = digest.ToHex();
  for (char& c : upper) c = static_cast<char>(std::toupper(c));
  EXPECT_EQ(*Digest::FromHex(upper), digest);
  EXPECT_TRUE(Digest{}.is_zero());
  EXPECT_FALSE(digest.is_zero());
}

TEST(Digest, BadHexAndBadLengthsAreRefused) {
  EXPECT_EQ(Digest::FromHex(std::string(63, '0')).status().message(),
            "key has 63 characters, want 64 hexadecimal digits");
  EXPECT_EQ(Digest::FromHex(std::string(65, '0')).status().code(),
            absl::StatusCode::kInvalidArgument);
  std::string bad(64, '0');
  bad[17] = 'g';
  EXPECT_EQ(Digest::FromHex(bad).status().message(),
            "key has a character that is not a hexadecimal digit at position 17");
  EXPECT_EQ(Digest::FromBytes(std::string(31, 'x'), "parent").status().message(),
            "parent is 31 bytes, want 32");
  EXPECT_EQ(*Digest::FromBytes(Sha256("x").AsStringView(), "parent"), Sha256("x"));
}

}  // namespace
}  // namespace kvstow
