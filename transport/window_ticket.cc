#include "transport/window_ticket.h"

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/status_macros.h"
#include "kernels/core/text.h"

namespace kvstow {
namespace {

constexpr std::string_view kMagic = "kvt";

char PathLetter(PathKind path) { return PathName(path)[0]; }

}  // namespace

std::string MakeTicket(PathKind path, uint8_t version, std::string_view body) {
  KVSTOW_CHECK(kTicketHeadBytes + body.size() <= kMaxTicketBytes);
  std::string ticket(kMagic);
  ticket += PathLetter(path);
  ticket += static_cast<char>(version);
  ticket += body;
  return ticket;
}

absl::StatusOr<std::string_view> TicketBody(PathKind path, uint8_t newest_version,
                                            std::string_view ticket) {
  if (ticket.size() < kTicketHeadBytes || ticket.size() > kMaxTicketBytes ||
      ticket.substr(0, kMagic.size()) != kMagic) {
    return absl::InvalidArgumentError(absl::StrCat(
        "these ", ticket.size(), " bytes are no window ticket: one has ", kTicketHeadBytes, " to ",
        kMaxTicketBytes, " bytes and begins with \"", ToAbsl(kMagic), "\""));
  }
  if (ticket[kMagic.size()] != PathLetter(path)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the window ticket is not one of path ", ToAbsl(PathName(path))));
  }
  const auto version = static_cast<uint8_t>(ticket[kMagic.size() + 1]);
  if (version < 1 || version > newest_version) {
    return absl::InvalidArgumentError(absl::StrCat("window ticket of path ", ToAbsl(PathName(path)),
                                                   ": version ", version, "; known are 1 to ",
                                                   newest_version));
  }
  return ticket.substr(kTicketHeadBytes);
}

}  // namespace kvstow
