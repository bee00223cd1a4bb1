// The admin page's document, style and script, whole: nothing is loaded from elsewhere.
//
//   page.body = [] { return std::string(kAdminHtml); };
#pragma once

#include <string_view>

namespace kvstow {

extern const std::string_view kAdminHtml;
extern const std::string_view kAdminCss;
extern const std::string_view kAdminJs;

}  // namespace kvstow
