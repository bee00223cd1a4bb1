#!/usr/bin/env bash
# Builds kvstow and runs every test. The last line is `N passed, N failed, N skipped`.
#
#   tests/run.sh          builds dev (all tests), asan (all but the long ones) and tsan (what does
#                         not link the packaged, uninstrumented gRPC), and the format check
#   tests/run.sh --fast   dev only
#
# Quiet while things go well; shows the output of what fails. Exit status 0 only when at least one
# test ran and none failed. Logs are kept in build/logs/.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

usage() { sed -n '2,/^set /p' tests/run.sh | sed -e '/^set /d' -e 's/^# \{0,1\}//'; }
builds=(dev asan tsan)
for arg in "$@"; do
  case "$arg" in
    --fast) builds=(dev) ;;
    -h | --help) usage; exit 0 ;;
    *) printf 'tests/run.sh: unknown option %s; known: --fast, --help\n' "$arg" >&2; exit 2 ;;
  esac
done

logs=build/logs
mkdir -p "$logs"
passed=0
failed=0
skipped=0
started=$SECONDS

say() { printf '%4ds  %s\n' $((SECONDS - started)) "$*"; }
count_failure() { failed=$((failed + 1)); }
finish() {
  printf '%d passed, %d failed, %d skipped\n' "$passed" "$failed" "$skipped"
  if [[ $failed -gt 0 ]]; then exit 1; fi
  if [[ $passed -eq 0 ]]; then
    printf 'tests/run.sh: no test ran\n' >&2
    exit 1
  fi
  exit 0
}

check_format() {
  local tool files output
  tool=$(command -v clang-format-14 || true)
  if [[ -z $tool ]]; then
    say "format: skipped, clang-format-14 is not installed (other versions format differently)"
    skipped=$((skipped + 1))
    return
  fi
  mapfile -t files < <(source_files)
  if output=$("$tool" --dry-run -Werror "${files[@]}" 2>&1); then
    say "format: ${#files[@]} files are as clang-format-14 writes them"
    passed=$((passed + 1))
  else
    printf '%s\n' "$output" | grep -E 'error:' | head -40
    say "format: FAILED; run clang-format-14 -i on the files above"
    count_failure
  fi
}

source_files() {
  if git rev-parse --is-inside-work-tree > /dev/null 2>&1; then
    git ls-files --cached --others --exclude-standard -- '*.h' '*.cc' '*.cu'
  else
    find . -path ./build -prune -o \( -name '*.h' -o -name '*.cc' -o -name '*.cu' \) -print
  fi | sort | while read -r file; do if [[ -f $file ]]; then printf '%s\n' "$file"; fi; done
}

# build_tree BUILD: configures and builds; on failure shows the errors and counts one.
build_tree() {
  local build=$1 log=$logs/$1-build.log
  if cmake --preset "$build" > "$log" 2>&1 && cmake --build --preset "$build" >> "$log" 2>&1; then
    say "$build: built"
    return 0
  fi
  grep -E -A12 'FAILED:|error:|CMake Error' "$log" | head -120
  say "$build: BUILD FAILED; the whole log is $log"
  count_failure
  return 1
}

# xml_attribute FILE NAME: the sum of an attribute over the <testsuite> elements of a result file.
xml_attribute() {
  grep -o '<testsuite [^>]*' "$1" | grep -o " $2=\"[0-9]*\"" | tr -dc '0-9\n' |
    awk '{sum += $1} END {print sum + 0}'
}

# Names what was skipped, and why.
list_skipped() {
  sed -nE -e 's/.*<testcase name="([^"]*)".* classname="([^"]*)".*/\2.\1/;T skip;h' \
    -e ':skip' -e 's/.*<skipped message="[^&"]*(&#x0A;)?([^"]*)".*/\2/;T;G;s/(.*)\n(.*)/      skipped \2: \1/p' "$@"
}

# count_entry BUILD NAME RESULT: adds one ctest entry to the totals of the build. A GoogleTest
# binary counts with its cases, anything else as one.
count_entry() {
  local xml=$logs/$1-xml/$2.xml result=$3 all bad not_run
  if [[ ! -s $xml ]]; then
    case "$result" in
      Passed) build_passed=$((build_passed + 1)) ;;
      Skipped) build_skipped=$((build_skipped + 1)) ;;
      *) build_failed=$((build_failed + 1)) ;;
    esac
    return
  fi
  all=$(xml_attribute "$xml" tests)
  bad=$(xml_attribute "$xml" failures)
  not_run=$(($(xml_attribute "$xml" skipped) + $(xml_attribute "$xml" disabled)))
  # A binary may fail after its last case: a leak, a sanitizer report, a crash on exit.
  if [[ $result != Passed && $bad -eq 0 ]]; then
    build_failed=$((build_failed + 1))
  fi
  build_failed=$((build_failed + bad))
  build_skipped=$((build_skipped + not_run))
  build_passed=$((build_passed + all - bad - not_run))
}

# run_tests BUILD [ctest arguments]
run_tests() {
  local build=$1 log=$logs/$1-tests.log ctest_status=0 name result
  shift
  rm -rf "$logs/$build-xml"
  mkdir -p "$logs/$build-xml"
  GTEST_OUTPUT="xml:$PWD/$logs/$build-xml/" GTEST_COLOR=no \
    ASAN_OPTIONS=detect_stack_use_after_return=1 UBSAN_OPTIONS=print_stacktrace=1 \
    TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1 \
    ctest --preset "$build" -j 2 "$@" > "$log" 2>&1 || ctest_status=$?

  build_passed=0
  build_failed=0
  build_skipped=0
  while read -r name result; do
    count_entry "$build" "$name" "$result"
  done < <(sed -nE \
    's/^ *[0-9]+\/[0-9]+ Test +#[0-9]+: ([^ ]+) \.*[ *]*(Passed|Failed|Skipped|Timeout|Exception|Not Run|Subprocess aborted).*/\1 \2/p' \
    "$log")
  # ctest says no although no entry does: no tests, a broken configuration.
  if [[ $ctest_status -ne 0 && $build_failed -eq 0 ]]; then build_failed=1; fi
  passed=$((passed + build_passed))
  failed=$((failed + build_failed))
  skipped=$((skipped + build_skipped))
  say "$build: $build_passed passed, $build_failed failed, $build_skipped skipped"
  list_skipped "$logs/$build-xml"/*.xml 2> /dev/null
  if [[ $build_failed -gt 0 ]]; then
    cat "$log"
    say "$build: TESTS FAILED; the log is $log"
  fi
}

if ! bash deploy/install_deps.sh --dev; then
  count_failure
  finish
fi
check_format
for build in "${builds[@]}"; do
  build_tree "$build" || continue
  if [[ $build == asan ]]; then
    run_tests asan -LE long
  else
    run_tests "$build"
  fi
done
finish
