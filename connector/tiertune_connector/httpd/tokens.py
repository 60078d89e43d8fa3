"""Bearer tokens by role, from a file that may be changed in place."""

import re
from dataclasses import dataclass
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path
from typing import Literal, cast, get_args

from tiertune_connector.documents import DocumentError, read_text
from tiertune_connector.httpd.renewed import Renewed

Role = Literal["read", "approve", "tune"]
ROLES: tuple[Role, ...] = get_args(Role)
"""Each may do what those before it may."""
LEAST_CHARACTERS = 20
"""Least length of a token: a shorter one could be guessed."""
_COMMENT = re.compile(r"(?:^|\s)#")
_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")


@dataclass(frozen=True)
class Holder:
    """Whom a token was given to."""

    name: str
    """As it stands in audit rows."""
    role: Role

    def may(self, role: Role) -> bool:
        return ROLES.index(self.role) >= ROLES.index(role)


class TokenFile:
    """The tokens of a file, read again when it has changed; a faulty edit leaves the tokens as they were."""

    def __init__(self, path: Path) -> None:
        """DocumentError names the line to mend."""
        self._holders = Renewed("the tokens stay as they were", lambda: parse(read_text(path), str(path)), path)

    def holder(self, token: str) -> Holder | None:
        """Whose token it is; None: nobody's. A token that is nearly right takes as long as any other."""
        asked, found = _digest(token), None
        for digest, holder in self._holders.now().items():
            if compare_digest(digest, asked):
                found = holder
        return found


def parse(text: str, name: str) -> dict[bytes, Holder]:
    """Holders by their token's digest. DocumentError for lines that are not ``role name token``; it shows no token."""
    holders: dict[bytes, Holder] = {}
    problems: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = _COMMENT.split(line, 1)[0].split()
        if not words:
            continue
        problem = _problem(words)
        if problem or _digest(words[2]) in holders:
            problems.append(f"{name}:{number}:1: {problem or 'the token stands here a second time'}")
            continue
        holders[_digest(words[2])] = Holder(words[1], cast("Role", words[0]))
    if not holders and not problems:
        problems.append(f"{name}:1:1: there is no token: write lines of: role name token")
    if problems:
        raise DocumentError(problems)
    return holders


def _problem(words: list[str]) -> str:
    if len(words) != 3:
        return "write: role name token"
    if words[0] not in ROLES:
        return f"the role is one of {', '.join(ROLES)}"
    if not _NAME.fullmatch(words[1]):
        return "a name has letters, digits and . _ @ - alone, at most 64"
    if "#" in words[2]:
        return "a token has no #, and a comment has a space before its own"
    if len(words[2]) < LEAST_CHARACTERS:
        return f"a token has at least {LEAST_CHARACTERS} characters: openssl rand -hex 32"
    return ""


def _digest(token: str) -> bytes:
    return sha256(token.encode()).digest()
