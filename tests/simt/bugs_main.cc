#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "bugs.h"
#include "simt.h"
// Each mistake runs in a child. Codes: 0 unseen, 11 wrong result, 12 fault, else the sanitizer's or
// a signal.
static std::string run(const Bug& b, int schedules, std::string* text) {
  int p[2];
  if (pipe(p)) std::abort();
  std::fflush(stdout);
  const pid_t pid = fork();
  if (!pid) {
    dup2(p[1], 2);
    alarm(10);
    int rc = 0;
    try {
      if (!schedules) {
        rc = b.run() ? 0 : 11;
      } else {
        simt::for_each_schedule(schedules, [&](const simt::Options&) {
          if (!b.run()) rc = 11;
        });
      }
    } catch (const simt::Fault& f) {
      std::fprintf(stderr, "%s\n", f.what());
      rc = 12;
    }
    std::fflush(stderr);
    _exit(rc);
  }
  close(p[1]);
  std::string s;
  char buf[4096];
  for (ssize_t n; (n = read(p[0], buf, sizeof buf)) > 0;)
    s.append(buf, static_cast<std::size_t>(n));
  close(p[0]);
  int st = 0;
  waitpid(pid, &st, 0);
  if (text) *text = s;
  if (WIFSIGNALED(st)) return "signal " + std::to_string(WTERMSIG(st));
  switch (WEXITSTATUS(st)) {
    case 0:
      return "-";
    case 11:
      return "wrong result";
    case 12:
      return "fault";
    default:
      return "sanitizer";
  }
}
// -v prints what was reported. Other arguments are mistakes that this build may miss; any other
// miss fails.
int main(int argc, char** argv) {
  const bool verbose = argc > 1 && !std::strcmp(argv[1], "-v");
  int bad = 0;
  std::printf("%-34s %-14s %s\n", "mistake", "lane order", "lane+reverse+8 random");
  for (const auto& b : bugs()) {
    std::string t;
    const std::string one = run(b, 0, nullptr), many = run(b, 8, &t);
    std::printf("%-34s %-14s %s\n", b.name, one.c_str(), many.c_str());
    const bool correct = b.name[0] == '(';
    bool may_miss = false;
    for (int i = 1; i < argc; ++i) may_miss |= !std::strcmp(argv[i], b.name);
    if (correct ? many != "-" : many == "-" && !may_miss) ++bad;
    if (verbose && !t.empty()) {
      std::size_t lines = 0, end = 0;
      while (end < t.size() && lines < 6)
        if (t[end++] == '\n') ++lines;
      std::printf("    | %s\n", t.substr(0, end).c_str());
    }
  }
  return bad != 0;
}
