"""An argument parser: dashes or underscores, dotted JSON keys, YAML files.

Knows how words become numbers, and how a refusal is said: in one line. Refuses to know
what an option is for.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

# A value, never the name of an option: "-1", "-.5", "-1GiB", "-inf".
_NEGATIVE = re.compile(r"-(\.?\d|inf|nan)", re.IGNORECASE)


class HelpWithDefaults(argparse.ArgumentDefaultsHelpFormatter):
    """Help that names defaults, of options that have one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None:
            return action.help
        return super()._get_help_string(action)


def whole_number(text: str) -> int:
    """Parses what `type=int` stands for."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected a whole number without a unit, for example 4096"
        ) from None


def number(text: str) -> float:
    """Parses what `type=float` stands for."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected a number without a unit, for example 0.5"
        ) from None


def text(given: str) -> str:
    """What argparse takes where an empty text, of an unset variable, is a mistake."""
    if not given.strip():
        raise argparse.ArgumentTypeError(
            f"{given!r}: expected text; leave the option out for its default"
        )
    return given


def at_least(least: int, step: int = 1) -> Callable[[str], int]:
    """What argparse takes for a number of at least `least`, in steps of `step`."""
    kind = "an even number" if step == 2 else "a whole number"

    def read(text: str) -> int:
        digits = text.strip()
        if not (digits.isascii() and digits.isdecimal()):
            digits = "-1"
        if int(digits) < least or int(digits) % step:
            raise argparse.ArgumentTypeError(
                f"{text!r}: expected {kind} of at least {least}"
            )
        return int(digits)

    return read


def json_value(text: str) -> Any:
    """Parses a JSON object given on the command line."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None


def _scalar(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


class FlexibleArgumentParser(argparse.ArgumentParser):
    """`--max_model_len` equals `--max-model-len`; `--x.a.b 1` equals `--x '{"a": …}'`;
    `--config file.yaml` supplies defaults that the command line overrides. What is
    refused is refused in one line, by the command that was given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Negative amounts reach the type of their option, which names them.
        self._negative_number_matcher = _NEGATIVE
        self.register("type", int, whole_number)
        self.register("type", float, number)

    def error(self, message: str) -> NoReturn:
        line = " ".join(part.strip() for part in message.splitlines())
        self.exit(2, f"{self.prog}: error: {line} (see {self.prog} --help)\n")

    def add_subparsers(self, **kwargs: Any) -> Any:
        return super().add_subparsers(**{"parser_class": _Subcommand, **kwargs})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        words = self._fold_dotted(
            [self._dashed(word) for word in self._with_file(words)]
        )
        return super().parse_known_args(words, namespace)

    @staticmethod
    def _dashed(word: str) -> str:
        if not word.startswith("--"):
            return word
        key, equals, value = word.partition("=")
        head, dot, tail = key.partition(".")
        return head.replace("_", "-") + dot + tail + equals + value

    def _with_file(self, words: list[str]) -> list[str]:
        """Puts the options of a --config file before the command line's own."""
        for i, word in enumerate(words):
            if word == "--config" and i + 1 < len(words):
                path, rest = words[i + 1], words[:i] + words[i + 2 :]
            elif word.startswith("--config="):
                path, rest = word.partition("=")[2], words[:i] + words[i + 1 :]
            else:
                continue
            # Subcommand and positionals stay first, so that options keep their owner.
            first = next(
                (j for j, w in enumerate(rest) if w.startswith("-")), len(rest)
            )
            return rest[:first] + self._file_options(path) + rest[first:]
        return words

    def _file_options(self, path: str) -> list[str]:
        try:
            settings = yaml.safe_load(Path(path).read_text())
        except (OSError, yaml.YAMLError) as error:
            self.error(f"--config {path}: {error}")
        if not isinstance(settings, dict):
            self.error(f"--config {path}: expected a mapping of option names to values")
        options: list[str] = []
        for key, value in settings.items():
            flag = f"--{key}"
            if value is True:
                options.append(flag)
            elif value is False:
                options.append(f"--no-{key}")
            elif isinstance(value, list):
                options += [flag, *map(str, value)]
            else:
                text = json.dumps(value) if isinstance(value, dict) else str(value)
                options += [flag, text]
        return options

    @staticmethod
    def _fold_dotted(words: list[str]) -> list[str]:
        """Collects `--option.key value` words into one `--option '{"key": value}'`."""
        plain: list[str] = []
        nested: dict[str, dict[str, Any]] = {}
        i = 0
        while i < len(words):
            word = words[i]
            key, equals, value = word.partition("=")
            i += 1
            if not key.startswith("--") or "." not in key:
                plain.append(word)
                continue
            if not equals:
                if i >= len(words):
                    plain.append(word)
                    break
                value = words[i]
                i += 1
            option, *path = key.split(".")
            target = nested.setdefault(option, {})
            for part in path[:-1]:
                target = target.setdefault(part, {})
            target[path[-1]] = _scalar(value)
        for option, tree in nested.items():
            plain += [option, json.dumps(tree)]
        return plain


class _Subcommand(FlexibleArgumentParser):
    """Takes all words that follow its name, so it is the one to refuse them."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        known, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return known, rest
