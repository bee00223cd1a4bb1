// kvstow: the command line.
#include <malloc.h>
#include <unistd.h>

#include <iostream>

#include "client/cli/commands.h"

namespace {

// By default glibc gives buffers of message size back to the kernel and pays for fresh pages at
// every message: a third of the throughput of a transfer.
void TuneMalloc() {
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
}

}  // namespace

int main(int argc, char** argv) {
  TuneMalloc();
  return kvstow::RunCli({argv + 1, argv + argc},
                        {std::cout, std::cerr, isatty(STDERR_FILENO) != 0});
}
