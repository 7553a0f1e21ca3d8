"""Check the commits since the rebuild: an imperative subject of at most 72 characters, and a body that says why.

python tools/commits.py [REVISION RANGE]
"""

from __future__ import annotations

import re
import subprocess
import sys

BASE = "7cfe22b272"  # the commits up to here were written before the rule
LONGEST = 72
# A first word that ends like another form of a verb, and is an imperative all the same.
IMPERATIVE = {"Address", "Bring", "Bypass", "Cross", "Discuss", "Embed", "Express", "Feed", "Focus", "Need", "Pass"}
IMPERATIVE |= {"Access", "Compress", "Dismiss", "Miss", "Press", "Process", "Shed", "Speed", "String", "Suppress"}


def complaints(subject: str, body: str) -> list[str]:
    first = subject.split(" ", 1)[0].removesuffix(",")  # "Open, check and create ..."
    found = []
    if len(subject) > LONGEST:
        found.append(f"the subject has {len(subject)} characters, more than {LONGEST}")
    if not re.fullmatch(r"[A-Z][\w-]*", first):
        found.append("the subject must begin with a capitalised verb, without a prefix such as 'Tests:'")
    elif re.search(r"(ed|ing|[^s]s|sses)$", first) and first not in IMPERATIVE:
        found.append(f"{first!r} is not an imperative: 'Add', not 'Added', 'Adds' or 'Adding'")
    if subject.endswith("."):
        found.append("the subject ends with a full stop")
    if not body.strip():
        found.append("the body that says why is missing")
    return found


def main(arguments: list[str]) -> int:
    chosen = arguments[0] if arguments else f"{BASE}..HEAD"
    log = ["git", "log", "--no-merges", "--format=%h%x00%s%x00%b%x01", chosen]
    done = subprocess.run(log, capture_output=True, text=True, check=False)
    if done.returncode:  # no repository, or a clone without that history
        print(f"commit messages not checked: {done.stderr.strip()}")
        return 0
    wrong = 0
    for entry in filter(str.strip, done.stdout.split("\x01")):
        number, subject, body = entry.strip("\n").split("\x00")
        for complaint in complaints(subject, body):
            wrong = 1
            print(f"{number} {subject!r}: {complaint}")
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
