"""An argument parser: dashes or underscores, dotted JSON keys, YAML files."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml


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
    `--config file.yaml` supplies defaults that the command line overrides."""

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
