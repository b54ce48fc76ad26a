"""What a connector did wrong, in words. Knows sentences, not connectors."""

from collections import Counter


class Report:
    """Complaints by rule. Of one rule only the first few are kept: the rest repeat."""

    MOST_PER_RULE = 3

    def __init__(self) -> None:
        self.complaints: list[str] = []
        self._counts: Counter[str] = Counter()
        self.num_promised = 0
        self.num_loaded = 0

    def is_full(self, rule: str) -> bool:
        """Says whether further complaints of a rule are only counted."""
        return self._counts[rule] >= self.MOST_PER_RULE

    def add(self, rule: str, text: str) -> None:
        self._counts[rule] += 1
        if self._counts[rule] <= self.MOST_PER_RULE:
            self.complaints.append(f"{rule}: {text}")

    def __bool__(self) -> bool:
        return bool(self.complaints)

    def __str__(self) -> str:
        more = [
            f"{rule}: {count - self.MOST_PER_RULE} more of these"
            for rule, count in self._counts.items()
            if count > self.MOST_PER_RULE
        ]
        return "\n".join(f"- {line}" for line in (*self.complaints, *more))
