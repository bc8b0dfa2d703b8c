"""The order desk: a database of customers, orders and parcels, the tools that look into it, and questions about it.

Each customer has one order, each order an item and a parcel, each parcel a state. A customer's number is below 400, an
order's from 400 to 699, a parcel's above. A question about a customer's parcel takes three calls, each with the number
that the one before it found.
"""

import random
import sqlite3
from typing import Any

NUM_CUSTOMERS = 300
ITEMS = ("lamp", "chair", "kettle", "clock", "tent", "radio", "scarf", "globe")
STATES = ("waiting", "packed", "shipped", "delayed", "delivered", "returned", "lost", "refused")
TOOLS = {  # tool -> what it is told, what it says, and the query
    "order_of": ("customer", "The number of a customer's order.", "SELECT number FROM orders WHERE customer = ?"),
    "item_of": ("order", "The item of an order.", "SELECT item FROM orders WHERE number = ?"),
    "parcel_of": ("order", "The number of an order's parcel.", "SELECT number FROM parcels WHERE order_number = ?"),
    "state_of": ("parcel", "The state of a parcel.", "SELECT state FROM parcels WHERE number = ?"),
}
QUESTIONS = {  # question -> the tools that answer it, in order
    "Which order is from customer {}?": ("order_of",),
    "What is in order {}?": ("item_of",),
    "Which parcel has order {}?": ("parcel_of",),
    "Where is parcel {}?": ("state_of",),
    "What did customer {} order?": ("order_of", "item_of"),
    "Which parcel goes to customer {}?": ("order_of", "parcel_of"),
    "Where is order {}?": ("parcel_of", "state_of"),
    "Where is the parcel of customer {}?": ("order_of", "parcel_of", "state_of"),
}


class Desk:
    """The database in memory: the same seed makes the same one."""

    def __init__(self, seed: int = 0) -> None:
        draw = random.Random(seed)
        self._database = sqlite3.connect(":memory:")
        self._database.execute("CREATE TABLE orders (number INT PRIMARY KEY, customer INT UNIQUE, item TEXT)")
        self._database.execute("CREATE TABLE parcels (number INT PRIMARY KEY, order_number INT UNIQUE, state TEXT)")
        orders = draw.sample(range(400, 700), NUM_CUSTOMERS)
        parcels = draw.sample(range(700, 1000), NUM_CUSTOMERS)
        for customer, order, parcel in zip(customers(), orders, parcels, strict=True):
            self._database.execute("INSERT INTO orders VALUES (?, ?, ?)", (order, customer, draw.choice(ITEMS)))
            self._database.execute("INSERT INTO parcels VALUES (?, ?, ?)", (parcel, order, draw.choice(STATES)))

    def call(self, tool: str, number: int) -> str:
        """What the tool says of a number; "none" where there is no such customer, order or parcel."""
        _, _, query = TOOLS[tool]
        found = self._database.execute(query, (number,)).fetchone()
        return "none" if found is None else str(found[0])

    def follow(self, tools: tuple[str, ...], number: int) -> list[str]:
        """What the tools say one after the other, each of what the one before it said."""
        said: list[str] = []
        for tool in tools:
            said.append(self.call(tool, int(said[-1]) if said else number))
        return said


def kind(number: int) -> str:
    """What has this number: "customer", "order" or "parcel"."""
    return "customer" if number < 400 else "order" if number < 700 else "parcel"


def customers() -> range:
    return range(100, 100 + NUM_CUSTOMERS)


def questions(desk: Desk, of: range) -> list[dict[str, Any]]:
    """Each question about each of these customers, about their orders and parcels: scenarios with an answer."""
    return [_question(desk, text, tools, customer) for customer in of for text, tools in QUESTIONS.items()]


def _question(desk: Desk, text: str, tools: tuple[str, ...], customer: int) -> dict[str, Any]:
    way = {"customer": (), "order": ("order_of",), "parcel": ("order_of", "parcel_of")}[TOOLS[tools[0]][0]]
    number = int(desk.follow(way, customer)[-1]) if way else customer
    task = text.format(number)
    return {"id": task, "task": task, "answer": desk.follow(tools, number)[-1], "calls": list(tools)}
