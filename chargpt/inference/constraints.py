"""Constraints on a sampled text, as one deterministic finite automaton over tokens.

Each constraint is a regular expression that the whole text must match:

| setting | expression |
|---|---|
| `match` | as given |
| `only`, `without` | no other letters than these, none of these, in either case |
| `word` | each occurs as a word, in either case |
| `lines` | so many lines, none of them blank |
| `acrostic` | the beginnings of the lines, one after another |
| `end` | each line ends so, in either case, but for characters that are not part of words |

Python's own parser reads an expression, so that it means what it means to `re.fullmatch`. Its
syntax tree becomes a nondeterministic automaton (Thompson 1968), that a deterministic one by the
subset construction (Rabin and Scott 1959), over classes of characters that the expression does not
tell apart. Several constraints are the product of their automata. States from which nothing matches
are removed: sampling that masks the tokens without a next state never meets a dead end. The
distance of a state is the number of characters that it takes to match, so that a text also ends in
time. That is the guided generation of Willard and Louf (2023), for single characters.

Look-around and backreferences are not regular, and are refused. So is an expression whose
automaton would be too large: what a setting may cost is bounded.

Shapes in this file: A = characters of the alphabet, S = states, C = classes of characters or
tokens, V = vocabulary size, N = sequences.
"""

import itertools
import re
import unicodedata
import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from chargpt.config import SampleConfig
from chargpt.errors import ConfigError
from chargpt.text.display import display_char, display_text
from chargpt.text.tokenizer import CharTokenizer, Ints

Bools = npt.NDArray[np.bool_]

_parser: Any = import_module("re._parser")
_compiler: Any = import_module("re._compiler")

CONSTRAINTS = ("match", "only", "without", "word", "lines", "acrostic", "end")  # settings
MAX_STATES = 20_000  # of an automaton
MAX_ENTRIES = 4_000_000  # of a table of next states
MAX_WORK = 10_000_000  # states that closures and the subset construction go through, a few seconds
FAR = 1 << 40  # distance of a state from which nothing matches
NO_WORD = "[^\\w'’-]"  # a character that delimits words
TOO_LARGE = "too large a pattern; use fewer repetitions or constraints: "


@dataclass(frozen=True)
class Automaton:
    """A deterministic automaton; state 0 is the first.

    Attributes:
        classes: class of each character of the alphabet or token, (A,) or (V,).
        next_state: (S, C), -1 where there is none.
        accepts: whether a text that ends in a state matches, (S,).
    """

    classes: Ints
    next_state: Ints
    accepts: Bools


class Constraint:
    """What may be sampled next, and whether the text may end, in each state.

    Attributes:
        automaton: over tokens.
        excluded: tokens that `only` and `without` exclude everywhere, (V,).
        distance: characters that it takes at least to match, (S,).
    """

    def __init__(self, automaton: Automaton, weights: Ints, excluded: Bools) -> None:
        """Take an automaton over tokens, and the characters that begin with a class, (C,)."""
        self.automaton, self.weights, self.excluded = automaton, weights, excluded
        self.distance = _distances(automaton, weights)

    def allowed(self, states: Ints, remaining: Ints) -> Bools:
        """Return which tokens lead to a match of at most `remaining` characters, (N, V)."""
        following = self.automaton.next_state[states]  # (N, C)
        leads = (following >= 0) & (
            self.distance[following] <= remaining[:, None] - self.weights[None]
        )
        allowed: Bools = leads[:, self.automaton.classes]
        return allowed

    def next_state(self, state: int, token: int) -> int:
        """Return the state after a token, -1 if there is none."""
        return int(self.automaton.next_state[state, self.automaton.classes[token]])


def expressions(options: SampleConfig, line_end: str) -> list[tuple[str, str]]:
    """Return the option of each constraint and its regular expression, for a text with these lines.

    Raises:
        ConfigError: they contradict each other.
    """
    found = [("--match", options.match)] if options.match is not None else []
    line = rf"[^{line_end}]*"
    if options.only is not None:
        found.append(("--only", rf"(?i:[\W\d_{re.escape(options.only)}])*"))
    if options.without is not None:
        found.append(("--without", rf"(?i:[^{re.escape(options.without)}])*"))
    for word in options.word:
        before = rf"(?:.*{NO_WORD})?" if _is_delimited(word[0]) else ".*"
        after = rf"(?:{NO_WORD}.*)?" if _is_delimited(word[-1]) else ".*"
        found.append(("--word", f"(?s:{before}(?i:{re.escape(word)}){after})"))
    n_lines = options.lines or len(options.acrostic)
    if len(options.acrostic) > n_lines:
        raise ConfigError(
            f"{len(options.acrostic):,} lines begin as given, and there are {n_lines:,}; raise "
            "--lines, or leave it out"
        )
    if n_lines:
        filled = rf"[^\S{line_end}]*[^\s]{line}"
        found.append(("--lines", filled + f"(?:{line_end}{filled}){{{n_lines - 1}}}"))
    if options.acrostic:
        starts = (line + line_end).join(map(re.escape, options.acrostic))
        found.append(("--acrostic", f"{starts}(?s:.*)"))
    if options.end is not None:
        each = rf"{line}(?i:{re.escape(options.end)})[^\w{line_end}]*"
        found.append(("--end", f"{each}(?:{line_end}{each})*"))
    return found


def _is_delimited(character: str) -> bool:
    """Return whether a character is part of words that others delimit, unlike in Chinese."""
    is_letter = re.match(r"\w", character) is not None
    return is_letter and unicodedata.category(character) != "Lo"


def build_constraint(
    options: SampleConfig, tokenizer: CharTokenizer, prompt: str = ""
) -> Constraint | None:
    """Return the constraint of sampling settings, None if they have none.

    Only characters of the vocabulary are sampled under it, and with byte tokens those that it
    names.

    Args:
        prompt: text that precedes what is sampled, and is matched, too.

    Raises:
        ConfigError: an expression is invalid, not regular or too large; or no text of at most
            `options.limit` characters matches.
    """
    known = tokenizer.characters.replace(tokenizer.eos_token, "", 1)
    only_cr = "\r" in known and "\n" not in known
    line_end = "\r\n" if tokenizer.has_crlf else "\r" if only_cr else "\n"
    named = expressions(options, line_end)
    if not named:
        return None
    trees = [(name, parse(name, pattern)) for name, pattern in named]
    wanted = set().union(*(_literals(tree) for _, tree in trees)) | set(prompt)
    missing = sorted(wanted - set(known))
    spelled = {case for each in missing for case in (each, each.lower(), each.upper())}
    if not tokenizer.has_bytes:
        spelled = set()
    spelled -= {*known, tokenizer.eos_token}
    alphabet = known + "".join(sorted(each for each in spelled if len(each) == 1))
    parts = [compile_tree(name, tree, alphabet) for name, tree in trees]
    automaton = reduce(product, parts)
    start = 0
    for character in prompt:
        found = alphabet.find(character)
        start = automaton.next_state[start, automaton.classes[found]] if found >= 0 else -1
        if start < 0:
            raise ConfigError(
                f"the prompt begins no text of these constraints: {_names(named)}; change it, or "
                "leave out --whole, which applies them to the prompt, too"
            )
    constraint = _over_tokens(_begun(automaton, int(start)), tokenizer, alphabet)
    for name, pattern in named:
        if name in ("--only", "--without"):
            for token, character in enumerate(tokenizer.characters):
                constraint.excluded[token] |= re.fullmatch(pattern, character) is None
    shortest = int(constraint.distance[0])
    if shortest >= FAR:
        lacks = ", ".join(display_char(each) for each in missing[:5] if each not in alphabet)
        reason = f" (the run's vocabulary lacks {lacks})" if lacks else ""
        raise ConfigError(
            f"no text satisfies these constraints{reason}: {_names(named)}; change or drop one"
        )
    if shortest > options.limit:
        option = "--max-chars" if options.max_chars else "--length"
        raise ConfigError(
            f"the shortest text of these constraints has {shortest:,} characters, and at most "
            f"{options.limit:,} are sampled: {_names(named)}; raise {option}"
        )
    return constraint


def _names(named: Iterable[tuple[str, str]]) -> str:
    """Return the names of constraints for a message."""
    return ", ".join(dict.fromkeys(name for name, _ in named))


def parse(name: str, pattern: str) -> Any:
    """Return the syntax tree of a regular expression, as of Python's `re`.

    Raises:
        ConfigError: it is invalid; the message names the setting.
    """
    try:
        with warnings.catch_warnings():  # of what Python may read otherwise one day
            warnings.simplefilter("ignore")
            return _parser.parse(pattern)
    except (OverflowError, RecursionError):
        raise ConfigError(TOO_LARGE + name) from None
    except re.error as error:
        shown = display_text(pattern[:80])
        raise ConfigError(f"{shown!r} is no regular expression: {error}; correct {name}") from None


def _literals(tree: Any) -> set[str]:
    """Return the characters that a syntax tree names."""
    found: set[str] = set()
    for operator, argument in tree:
        if str(operator) == "LITERAL":
            found.add(chr(argument))
        elif str(operator) == "IN":
            found |= _literals(argument)
        elif isinstance(argument, tuple):
            parts = argument[-1] if str(operator) == "BRANCH" else [argument[-1]]
            trees = [part for part in parts if isinstance(part, _parser.SubPattern)]
            found = found.union(*map(_literals, trees))
    return found


class _Nfa:
    """A nondeterministic automaton of a syntax tree, over an alphabet.

    A state has edges that read nothing, to `empty[state]`, and at most one that reads a character
    of the set `reads[state]`, an index into `sets`, to `targets[state]`.
    """

    def __init__(self, name: str, alphabet: str) -> None:
        self.name, self.alphabet = name, alphabet
        self.sets: dict[Any, Bools] = {}  # which characters, (A,), by node and flags
        self.empty: list[list[int]] = []
        self.reads: list[Any] = []
        self.targets: list[int] = []

    def new_state(self) -> int:
        if len(self.reads) == MAX_STATES:
            raise ConfigError(TOO_LARGE + self.name)
        self.empty.append([])
        self.reads.append(None)
        self.targets.append(-1)
        return len(self.reads) - 1

    def append(self, nodes: Iterable[Any], flags: int, state: int) -> int:
        """Add the nodes of a tree one after another; return the state after them."""
        for operator, argument in nodes:
            state = self._append_node(str(operator), operator, argument, flags, state)
        return state

    def _append_node(self, kind: str, operator: Any, argument: Any, flags: int, state: int) -> int:
        if kind in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
            end = self.new_state()
            key = (repr((operator, argument)), flags)
            if key not in self.sets:
                if (1 + len(self.sets)) * len(self.alphabet) > MAX_ENTRIES:
                    raise ConfigError(TOO_LARGE + self.name)
                self.sets[key] = self._members((operator, argument), flags)
            self.reads[state], self.targets[state] = key, end
            # a state with such an edge gets no other one
            following = self.new_state()
            self.empty[end].append(following)
            return following
        if kind == "SUBPATTERN":
            _, added, removed, nodes = argument
            return self.append(nodes, (flags | added) & ~removed, state)
        if kind == "BRANCH":
            end = self.new_state()
            for nodes in argument[1]:
                self.empty[state].append(begin := self.new_state())
                self.empty[self.append(nodes, flags, begin)].append(end)
            return end
        if kind in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, nodes = argument
            return self._repeat(least, most, nodes, flags, state)
        raise ConfigError(
            "no automaton can match look-around, backreferences, ^, $ or \\b; the whole text has "
            f"to match, so leave it out of {self.name}"
        )

    def _repeat(self, least: int, most: int, nodes: Any, flags: int, state: int) -> int:
        for _ in range(least):
            state = self.append(nodes, flags, state)
        if most == _parser.MAXREPEAT:
            self.empty[state].append(begin := self.new_state())
            self.empty[self.append(nodes, flags, begin)].append(begin)
            self.empty[begin].append(end := self.new_state())
            return end
        end = self.new_state()
        self.empty[state].append(end)
        for _ in range(most - least):
            self.empty[state].append(begin := self.new_state())
            state = self.append(nodes, flags, begin)
            self.empty[state].append(end)
        return end

    def _members(self, node: Any, flags: int) -> Bools:
        """Return which characters of the alphabet a node matches, (A,), as `re` does."""
        state = _parser.State()
        state.flags = flags
        pattern = _compiler.compile(_parser.SubPattern(state, [node]), flags)
        return np.array([pattern.fullmatch(each) is not None for each in self.alphabet], np.bool_)

    def closures(self) -> list[int]:
        """Return the states that each one reaches without reading, as bits of an integer."""
        found, work = [], 0
        for state in range(len(self.empty)):
            reached, stack = 1 << state, [state]
            while stack:
                for following in self.empty[stack.pop()]:
                    work += 1
                    if not reached >> following & 1:
                        reached |= 1 << following
                        stack.append(following)
            found.append(reached)
            if work > MAX_WORK:
                raise ConfigError(TOO_LARGE + self.name)
        return found


def compile_tree(name: str, tree: Any, alphabet: str) -> Automaton:
    """Return the automaton of a syntax tree from `parse`, over an alphabet.

    Raises:
        ConfigError: it is not regular, or too large; the message names the setting.
    """
    nodes = list(tree)
    for place, anchors in ((0, "AT_BEGINNING AT_BEGINNING_STRING"), (-1, "AT_END AT_END_STRING")):
        while nodes and nodes[place][0] == _parser.AT and str(nodes[place][1]) in anchors.split():
            nodes.pop(place)
    nfa = _Nfa(name, alphabet)
    try:
        last = nfa.append(nodes, tree.state.flags, nfa.new_state())
    except RecursionError:
        raise ConfigError(TOO_LARGE + name) from None
    members = np.array([*nfa.sets.values(), np.zeros(len(alphabet), np.bool_)])
    columns, classes = np.unique(members, axis=1, return_inverse=True)
    readers = dict.fromkeys(nfa.sets, 0)  # states with an edge that reads a set
    for state, key in enumerate(nfa.reads):
        if key is not None:
            readers[key] |= 1 << state
    reading = [  # by class, the states with an edge that reads it
        reduce(int.__or__, itertools.compress(readers.values(), column), 0) for column in columns.T
    ]
    closures, work = nfa.closures(), 0
    numbers, rows = {closures[0]: 0}, []
    queue = deque([closures[0]])
    while queue:
        states, row = queue.popleft(), []
        for can_read in reading:
            following, left = 0, states & can_read
            while left:
                state = left.bit_length() - 1
                left ^= 1 << state
                following |= closures[nfa.targets[state]]
                work += 1
            if following and following not in numbers:
                numbers[following] = len(numbers)
                queue.append(following)
            row.append(numbers[following] if following else -1)
        rows.append(row)
        if len(numbers) > MAX_STATES or work > MAX_WORK:
            raise ConfigError(TOO_LARGE + name)
    accepts = np.array([bool(states >> last & 1) for states in numbers])
    return Automaton(classes.ravel().astype(np.int64), np.array(rows, np.int64), accepts)


def product(first: Automaton, second: Automaton) -> Automaton:
    """Return the automaton of the texts that two automata over one alphabet both match."""
    n_classes = second.next_state.shape[1]
    pairs, classes = np.unique(first.classes * n_classes + second.classes, return_inverse=True)
    columns = np.divmod(pairs, n_classes)
    n_states = len(second.accepts)
    known = frontier = np.zeros(1, np.int64)  # state of the first * n_states + state of the second
    rows = []
    while frontier.size:
        states = np.divmod(frontier, n_states)
        both = [
            each.next_state[state[:, None], column[None]]
            for each, state, column in zip((first, second), states, columns, strict=True)
        ]
        codes = np.where((both[0] >= 0) & (both[1] >= 0), both[0] * n_states + both[1], -1)
        rows.append(codes)
        found = np.unique(codes)
        frontier = np.setdiff1d(found[found >= 0], known, assume_unique=True)
        known = np.append(known, frontier)
        if len(known) > MAX_STATES or len(known) * len(pairs) > MAX_ENTRIES:
            raise ConfigError(TOO_LARGE + "what they have in common")
    order = np.argsort(known)
    codes = np.concatenate(rows)  # (S, C)
    next_state = order[np.searchsorted(known, codes.clip(min=0), sorter=order)]
    accepts = first.accepts[known // n_states] & second.accepts[known % n_states]
    return Automaton(classes.ravel(), np.where(codes >= 0, next_state, -1), accepts)


def _begun(automaton: Automaton, start: int) -> Automaton:
    """Return an automaton that starts in another state, which is exchanged with state 0."""
    order = np.arange(len(automaton.accepts))
    order[[0, start]] = start, 0
    next_state = automaton.next_state[order]
    next_state = np.where(next_state >= 0, order[next_state], -1)
    return Automaton(automaton.classes, next_state, automaton.accepts[order])


def _over_tokens(automaton: Automaton, tokenizer: CharTokenizer, alphabet: str) -> Constraint:
    """Return the constraint of an automaton over the alphabet.

    Tokens that are no character of the alphabet are in a class without next states. Characters that
    the vocabulary lacks are spelled by byte tokens, by way of further states.
    """
    n_states, n_classes = automaton.next_state.shape
    classes = np.full(tokenizer.vocab_size, n_classes)
    byte_class: dict[int, int] = {}
    spelled: list[tuple[int, Sequence[int]]] = []  # class of a character, and of its bytes
    for character, its_class in zip(alphabet, automaton.classes.tolist(), strict=True):
        tokens = tokenizer.encode(character).tolist()
        if len(tokens) == 1 and tokens[0] < len(tokenizer.characters):
            classes[tokens[0]] = its_class
        else:
            for token in tokens:
                classes[token] = byte_class.setdefault(token, n_classes + 1 + len(byte_class))
            spelled.append((its_class, [byte_class[token] for token in tokens]))
    table = np.pad(automaton.next_state, ((0, 0), (0, 1 + len(byte_class))), constant_values=-1)
    next_state = table.tolist() if spelled else []
    for state, (its_class, byte_classes) in itertools.product(range(n_states), spelled):
        target, current = next_state[state][its_class], state
        if target < 0:
            continue
        for each in byte_classes[:-1]:
            if next_state[current][each] < 0:
                next_state[current][each] = len(next_state)
                next_state.append([-1] * len(next_state[0]))
            current = next_state[current][each]
        next_state[current][byte_classes[-1]] = target
    if spelled:
        table = np.array(next_state, np.int64)
    weights = np.ones(1 + n_classes + len(byte_class), np.int64)
    for token, its_class in byte_class.items():
        weights[its_class] = token < tokenizer.first_continuation_id
    accepts = np.pad(automaton.accepts, (0, len(table) - n_states))
    return Constraint(
        Automaton(classes, table, accepts), weights, np.zeros(tokenizer.vocab_size, np.bool_)
    )


def _distances(automaton: Automaton, weights: Ints) -> Ints:
    """Return the number of characters from each state to the nearest that accepts, (S,), or FAR.

    A breadth-first search backwards, in which some edges weigh nothing.
    """
    sources, columns = np.nonzero(automaton.next_state >= 0)
    targets = automaton.next_state[sources, columns]
    n_states = len(automaton.accepts)
    codes = np.unique((targets * n_states + sources) * 2 + weights[columns])
    before: dict[int, list[tuple[int, int]]] = {}
    for code in codes.tolist():
        target, source = divmod(code // 2, n_states)
        before.setdefault(target, []).append((source, code % 2))
    distance = [FAR] * len(automaton.accepts)
    queue = deque(np.flatnonzero(automaton.accepts).tolist())
    for state in queue:
        distance[state] = 0
    while queue:
        state = queue.popleft()
        for source, weight in before.get(state, ()):
            if distance[state] + weight < distance[source]:
                distance[source] = distance[state] + weight
                (queue.append if weight else queue.appendleft)(source)
    return np.array(distance, np.int64)
