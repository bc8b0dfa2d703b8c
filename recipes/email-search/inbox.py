"""A mailbox of one person, made from a seed, and a question that one e-mail of it answers.

Each e-mail says where, when and with whom its sender meets about a project, and what the project costs. A question asks
for one of these facts, of one sender and one project. No two e-mails of a mailbox have the same sender and project.
"""

import random
import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

NAMES = """\
Ada Boris Clara Dmitri Elena Farid Greta Hugo Ines Jonas Keiko Luca Mara Nils Olga Pedro Rosa Samir Tessa Vera
audit budget catalog demo exhibit forecast garage harvest journal kitchen lease merger office payroll retreat survey
Athens Berlin Cairo Dublin Florence Geneva Helsinki Istanbul Jakarta Kyoto Lisbon Madrid Nairobi Oslo Paris Rome Seoul
Monday Tuesday Wednesday Thursday Friday Saturday Sunday
"""
PEOPLE, PROJECTS, PLACES, DAYS = (line.split() for line in NAMES.splitlines())
ASIDES = (
    "Thanks for your note of last week.",
    "Please bring the draft that we talked about.",
    "The train was late again, so I write from the station.",
    "I have not heard from the others yet.",
    "Let me know if that does not suit you.",
    "The weather here is as bad as ever.",
)
QUESTIONS = {
    "place": "Where does {sender} meet about the {project}?",
    "day": "When does {sender} meet about the {project}?",
    "guest": "Whom does {sender} meet about the {project}?",
    "price": "What does {sender} pay for the {project}?",
}
NUM_HITS = 5  # most e-mails that one search shows


class Size(NamedTuple):
    """How hard the mailboxes are. Example: Size(emails=200, names=30, facts=("place", "price"), asides=3)"""

    emails: int
    names: int  # how many of the people, projects and places are used; fewer make more e-mails alike
    facts: Sequence[str]  # what e-mails tell and questions ask, names of QUESTIONS
    asides: int = 0  # sentences of an e-mail besides its facts


class Email(NamedTuple):
    """Example: Email(3, "Ada", "budget", {"place": "Oslo", "day": "Friday"}, ())"""

    id: int
    sender: str
    project: str
    facts: dict[str, str]
    asides: Sequence[str]

    @property
    def text(self) -> str:
        words = {"place": "in {place}", "day": "on {day}", "guest": "with {guest}"}
        where = " ".join(words[fact] for fact in words if fact in self.facts)
        sentences = [f"We meet {where}."] if where else []
        sentences += ["It costs {price} euros."] if "price" in self.facts else []
        body = " ".join([*self.asides[::2], *sentences, *self.asides[1::2]]).format(**self.facts)
        return f"From: {self.sender}\nSubject: {self.project}\n{body}"


class Question(NamedTuple):
    text: str
    answer: str
    email: int  # the id of the e-mail that has the answer


def make_mailbox(seed: str, size: Size) -> tuple[list[Email], Question]:
    """The e-mails, numbered from 1, and the question; the same for the same seed."""
    draw = random.Random(seed)
    people, projects, places = PEOPLE[: size.names], PROJECTS[: size.names], PLACES[: size.names]
    about = draw.sample([(sender, project) for sender in people for project in projects], size.emails)
    emails = []
    for number, (sender, project) in enumerate(about, 1):
        guest = draw.choice([name for name in people if name != sender])
        drawn = {"place": draw.choice(places), "day": draw.choice(DAYS), "guest": guest}
        drawn["price"] = f"{draw.randrange(1, 100)}0"
        asides = draw.sample(ASIDES, size.asides)
        emails.append(Email(number, sender, project, {fact: drawn[fact] for fact in size.facts}, asides))
    asked, fact = draw.choice(emails), draw.choice(size.facts)
    text = QUESTIONS[fact].format(sender=asked.sender, project=asked.project)
    return emails, Question(text, asked.facts[fact], asked.id)


class Mailbox:
    """The e-mails behind SQLite's full-text search: what an agent may do with them."""

    def __init__(self, emails: Iterable[Email]) -> None:
        self._texts = {email.id: email.text for email in emails}
        self._database = sqlite3.connect(":memory:")
        self._database.execute("create virtual table email using fts5(sender, project, text)")
        rows = [(email.id, email.sender, email.project, email.text) for email in emails]
        self._database.executemany("insert into email (rowid, sender, project, text) values (?, ?, ?, ?)", rows)

    def search(self, query: str) -> str:
        """The e-mails that have all words of the query, the best matches first: number, sender and project of each."""
        words = "".join(letter if letter.isalnum() else " " for letter in query).split()
        if not words:
            return ""
        asked = " ".join(f'"{word}"' for word in words)  # quoted: no word of FTS5's own language
        found = self._database.execute(
            "select rowid, sender, project from email where email match ? order by rank, rowid limit ?",
            (asked, NUM_HITS),
        )
        return "\n".join(f"{id} {sender} {project}" for id, sender, project in found)

    def read(self, id: Any) -> str:
        """The e-mail of that number; "" if there is none."""
        return self._texts.get(id, "") if type(id) is int else ""

    def close(self) -> None:
        self._database.close()


def is_right(answer: str, truth: str) -> bool:
    """Whether an answer is the fact, apart from capitals, punctuation and words such as "in" around it."""
    words = "".join(letter if letter.isalnum() else " " for letter in answer.casefold()).split()
    return [word for word in words if word not in ("in", "on", "with", "euros")] == truth.casefold().split()
