"""The command `completion`: scripts for bash, zsh and fish, made from the parsers of all verbs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from twin.cli.commands import NOUNS, parser_of
from twin.cli.grammar import Verb

if TYPE_CHECKING:
    from rich.console import Console

BASH = """\
# Completion of racktwin for bash: source <(racktwin completion bash)
_racktwin() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words=
    local call="${{COMP_WORDS[1]}} ${{COMP_WORDS[2]}}"
    case "$call $before" in
{values}
    esac
    if [ -z "$words" ]; then
        if [ "$COMP_CWORD" = 1 ]; then words="{nouns}"
        elif [[ "$word" == -* ]]; then
            case "$call" in
{options}
            esac
        elif [ "$COMP_CWORD" = 2 ]; then
            case "${{COMP_WORDS[1]}}" in
{verbs}
            esac
        fi
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _racktwin racktwin
"""
ZSH = """\
#compdef racktwin
# Completion of racktwin for zsh: source <(racktwin completion zsh)
autoload -U +X bashcompinit && bashcompinit
"""


def _calls() -> list[tuple[str, str]]:
    return [(noun, verb) for noun, made in NOUNS.items() for verb in made.verbs]


def _options(noun: str, verb: str) -> dict[str, tuple[str, list[str]]]:
    """Options of a verb: name to (help, values that it may have)."""
    found = {}
    for action in parser_of(noun, verb)._actions:
        if action.help != argparse.SUPPRESS:
            for name in action.option_strings:
                text = (action.help or "").replace("%%", "%")
                found[name] = (text, [str(choice) for choice in action.choices or ()])
    return found


def bash() -> str:
    """The script for bash, which zsh reads too."""
    values, options = [], []
    for noun, verb in _calls():
        named = _options(noun, verb)
        call = f'"{noun} {verb}' if verb else f'"{noun} "*"'
        values += [f'    {call} {name}") words="{" ".join(v)}" ;;' for name, (_, v) in named.items() if v]
        call = f'"{noun} {verb}"' if verb else f'"{noun} "*'
        options.append(f'            {call}) words="{" ".join(named)}" ;;')
    verbs = {noun: " ".join(filter(None, made.verbs)) for noun, made in NOUNS.items()}
    return BASH.format(
        values="\n".join(values),
        nouns=" ".join(NOUNS),
        verbs="\n".join(f'            {noun}) words="{text}" ;;' for noun, text in verbs.items()),
        options="\n".join(options),
    )


def zsh() -> str:
    """The script for zsh: that of bash, which it can read."""
    return ZSH + bash()


def fish() -> str:
    """The script for fish, one line a noun, verb and option."""

    def line(condition: str, rest: str, text: str) -> str:
        quoted = text.replace("%%", "%").replace("\\", "").replace("'", "\\'")
        return f"complete -c racktwin -n '{condition}' {rest} -d '{quoted}'"

    lines = ["# Completion of racktwin for fish: racktwin completion fish | source"]
    for noun, made in NOUNS.items():
        lines.append(line("__fish_use_subcommand", f"-f -a {noun}", made.text))
        verbs = [verb for verb in made.verbs if verb]
        beside = f"__fish_seen_subcommand_from {noun}; and not __fish_seen_subcommand_from {' '.join(verbs)}"
        lines += [line(beside, f"-f -a {verb}", made.verbs[verb][1]) for verb in verbs]
    for noun, verb in _calls():
        place = f"__fish_seen_subcommand_from {noun}" + (
            f"; and __fish_seen_subcommand_from {verb}" if verb else ""
        )
        for name, (text, values) in _options(noun, verb).items():
            if name.startswith("--"):
                rest = f"-l {name[2:]}" + (f" -x -a '{' '.join(values)}'" if values else "")
                lines.append(line(place, rest, text))
    return "\n".join(lines) + "\n"


def run_completion(args: argparse.Namespace, out: Console, *_: Console) -> int:
    """Print the script of a shell."""
    out.file.write(SHELLS[args.shell]())
    return 0


SHELLS = {"bash": bash, "zsh": zsh, "fish": fish}
VERBS = {
    "completion": Verb(
        run_completion, "bash|zsh|fish>shell  the shell", ("bash", "zsh", "fish"), answers=False
    )
}
