// The bash completion script, made from the table of commands so that it cannot fall behind it.
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cli/commands.h"
#include "kernels/core/text.h"

namespace kvstow {
namespace {

// "--out --long --target ..." of one command.
std::string OptionWords(const CommandSpec& spec) {
  std::vector<std::string> words;
  for (absl::Span<const Option> options : {spec.options, CommonOptions()}) {
    for (const Option& option : options) words.push_back(absl::StrCat("--", ToAbsl(option.name)));
  }
  return absl::StrJoin(words, " ");
}

}  // namespace

std::string BashCompletion() {
  std::vector<std::string> names;
  std::string cases;
  for (const Command* command : AllCommands()) {
    names.emplace_back(command->spec.name);
    if (command->spec.passes_words_on) continue;
    absl::StrAppend(&cases, "    ", ToAbsl(command->spec.name), ") options=\"",
                    OptionWords(command->spec), "\" ;;\n");
  }
  const std::string commands = absl::StrJoin(names, " ");
  return absl::StrCat(
      "# bash completion for kvstow; load it with: source <(kvstow completion bash)\n"
      "_kvstow() {\n"
      "  local word=\"${COMP_WORDS[COMP_CWORD]}\" options=\"\"\n"
      "  COMPREPLY=()\n"
      "  if [ \"$COMP_CWORD\" -eq 1 ]; then\n"
      "    COMPREPLY=($(compgen -W \"",
      commands,
      " --help --version\" -- \"$word\"))\n"
      "    return\n"
      "  fi\n"
      "  case \"${COMP_WORDS[1]}\" in\n",
      cases,
      "  esac\n"
      "  if [ \"${COMP_WORDS[1]}\" = help ]; then\n"
      "    COMPREPLY=($(compgen -W \"",
      commands,
      "\" -- \"$word\"))\n"
      "  elif [ \"${COMP_WORDS[1]}\" = completion ]; then\n"
      "    COMPREPLY=($(compgen -W \"bash\" -- \"$word\"))\n"
      "  elif [ \"${COMP_WORDS[COMP_CWORD-1]}\" = --codec ] ||\n"
      "       [ \"${COMP_WORDS[COMP_CWORD-1]}\" = --codecs ]; then\n"
      "    COMPREPLY=($(compgen -W \"raw int8 safe lossless small tiny tq4 k=tqm4,v=tq4\" -- "
      "\"$word\"))\n"
      "  elif [[ \"$word\" == -* ]]; then\n"
      "    COMPREPLY=($(compgen -W \"$options\" -- \"$word\"))\n"
      "  else\n"
      "    COMPREPLY=($(compgen -f -- \"$word\"))\n"
      "  fi\n"
      "}\n"
      "complete -o filenames -F _kvstow kvstow\n");
}

}  // namespace kvstow
