"""What the documentation is made of: pages, links, blocks, commands. Reads text; knows nothing of TierTune."""

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")])
_FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_HEREDOC = re.compile(r"^([^\n]*?)<<'?(\w+)'?([^\n]*)\n(.*?)^\2$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
_ENDS = {"|", ">", "<", "&", ";", ")", "||", "&&", ">>", ">&", "&>", "..."}


@dataclass(frozen=True)
class Block:
    """A fenced block; ``line`` is the file's line at which it begins."""

    page: Path
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def heredocs(self) -> dict[str, str]:
        """Text by the name of the file that a script writes it to."""
        found = _HEREDOC.findall(self.text)
        named = ((re.search(r"> (\S+)", before + after), text) for before, _, after, text in found)
        return {Path(name[1]).name: text for name, text in named if name}

    @property
    def script(self) -> list[str]:
        """Lines of shell without heredocs, continued ones whole."""
        bare = _HEREDOC.sub(r"\1\3", self.text)
        return re.sub(r"\\\n", " ", bare).splitlines()


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        yield Block(page, text[: match.start()].count("\n") + 2, match[2].strip(), match[3])


def prose(page: Path) -> str:
    """The text without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def links(page: Path) -> list[str]:
    """Targets of all links that lead to a file of ours, or to a place in one."""
    targets = _LINK.findall(re.sub(r"`[^`\n]*`", "", prose(page)))
    return [target for target in targets if not re.match(r"\w+:", target)]


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    seen: Counter[str] = Counter()
    made = set()
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).strip().replace(" ", "-")
        made.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return made


def spans(page: Path) -> list[str]:
    """What stands between backticks in prose."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(page))]


def commands(line: str, program: str) -> Iterator[list[str]]:
    """Arguments of each call of a program in a line of shell, up to where the shell goes on."""
    starts = rf"(?:^|[;&|]|\bdo\b|\bthen\b)\s*(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?{program}(?:\s|$)"
    for match in re.finditer(starts, line):
        words: list[str] = []
        for word in _words(line[match.end() :]):
            if word in _ENDS:
                if word.startswith(">") and words[-1:] in (["1"], ["2"]):
                    words.pop()  # 2>&1
                break
            words.append(word)
        yield words


def _words(text: str) -> list[str]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, "#"
    try:
        return list(lexer)
    except ValueError:  # a quote that the next line closes
        return text.split()
