"""Prompts for benchmarks and equality tests: varied ones, some whose answers copy, some that extract facts as JSON."""

from typing import Any

_REPORT = (
    "The harbour office opened in 1921 on the north quay. It kept the tide tables, the pilot roster and the weights of "
    "every cargo that left the town. In 1954 the roof burned, and the records were moved to the customs house, where "
    "two clerks spent nine years copying the damaged pages by hand. The copies are still used: when the channel was "
    "dredged in 1998, the engineers found that the soundings of 1931 were more exact than those of 1987."
)
_CODE = """def read_table(path, separator=","):
    rows = []
    with open(path) as file:
        header = file.readline().strip().split(separator)
        for line in file:
            values = line.strip().split(separator)
            rows.append(dict(zip(header, values)))
    return rows


def write_table(path, rows, separator=","):
    header = list(rows[0])
    with open(path, "w") as file:
        file.write(separator.join(header) + "\\n")
        for row in rows:
            file.write(separator.join(str(row[name]) for name in header) + "\\n")
"""
_LIST = """- 3 kg of flour, sieved twice
- 1 litre of whole milk, at room temperature
- 12 eggs from the farm at Oldbury
- 250 g of butter, unsalted
- the zest of four lemons
- a pinch of saffron, soaked overnight"""
_MINUTES = (
    "Present: Ms Adeyemi (chair), Mr Kowalski, Dr Lindqvist, Ms Tanaka. The minutes of 4 March were approved. "
    "Mr Kowalski reported that the pump in building C fails about twice a month and asked for 8,400 euros for a new "
    "one. Dr Lindqvist said that the warranty runs until August. The board agreed to write to the maker first. "
    "Ms Tanaka will send the letter by Friday."
)
_LOG = """10:02:11 worker-3 started job 8812
10:02:14 worker-1 finished job 8809 in 41 s
10:02:15 worker-3 failed job 8812: disk full on /var/spool
10:02:15 scheduler moved job 8812 to worker-2
10:02:58 worker-2 finished job 8812 in 43 s"""

VARIED: tuple[str, ...] = (
    "Write a short story about a lighthouse keeper who cannot sleep.",
    "Explain to a child why the sky is blue.",
    "What are three good habits for learning a language?",
    "Write a Python function that checks whether a string is a palindrome.",
    "Give me a recipe for a simple vegetable soup.",
    "Summarise the plot of Romeo and Juliet in four sentences.",
    "What is the difference between a list and a tuple in Python?",
    "Write a polite email that asks for a refund for a broken kettle.",
    "List the planets of the solar system with one fact about each.",
    "Describe the taste of a ripe mango to somebody who never ate one.",
    "How does a bicycle stay upright?",
    "Write a haiku about the first snow.",
    "Explain how HTTP caching works.",
    "What should I pack for a week of hiking in the mountains?",
    "Translate 'Good morning, how are you?' into French, Spanish and German.",
    "Write a SQL query that finds the ten customers with the most orders.",
    "Why did the Roman Empire fall? Give two theories.",
    "Write a dialogue between a cat and a dog about the weather.",
    "What is the derivative of x squared times the sine of x?",
    "Suggest five names for a small bakery.",
    "Explain what a KV cache is in a language model.",
    "Write the opening paragraph of a detective novel set in Lisbon.",
    "How do I remove a coffee stain from a white shirt?",
    "Compare trains and planes for a journey of 500 kilometres.",
    "Write a JSON object that describes a book with title, author and year.",
    "What happens to a leaf in autumn?",
    "Give step by step instructions for making paper boats.",
    "What are the pros and cons of working from home?",
    "Write a bash script that counts the lines of all .txt files in a folder.",
    "Tell me about the history of chess in a few sentences.",
)
"""About ten each of chat, explanations, and code or structured text, mixed."""

COPYING: tuple[str, ...] = (
    f"Summarise this report, quoting its key sentences word for word:\n\n{_REPORT}",
    f"Repeat the following text exactly:\n\n{_REPORT}",
    f"Add a docstring to each function of this module and print the whole module:\n\n{_CODE}",
    f"Rename the parameter `separator` to `delimiter` and print the whole module:\n\n{_CODE}",
    f"Print this shopping list again, with numbers instead of dashes:\n\n{_LIST}",
    f"Copy the shopping list below and add one more item at its end:\n\n{_LIST}",
    f"Correct the spelling of these minutes where needed and print them in full:\n\n{_MINUTES}",
    f"Quote every sentence of these minutes that names a person:\n\n{_MINUTES}",
    f"Print the lines of this log again, in the same order, as a quotation:\n\n{_LOG}",
    f"Which job failed? First repeat the log, then answer:\n\n{_LOG}",
)
"""Summaries with quotes, code edits, and copies with small changes."""


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object that has all of some properties."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _texts(most: int) -> dict[str, Any]:
    return {"type": "array", "items": _TEXT, "maxItems": most}


_TEXT = {"type": "string", "maxLength": 80}
_NUMBER = {"type": "integer"}

EXTRACTION: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        f"Extract the office's facts as JSON:\n\n{_REPORT}",
        _object(office_name=_TEXT, opening_year=_NUMBER, location=_TEXT, fire_year=_NUMBER, documents_kept=_texts(4)),
    ),
    (
        f"Extract the ingredients as JSON:\n\n{_LIST}",
        _object(
            ingredients={
                "type": "array",
                "items": _object(ingredient_name=_TEXT, quantity=_TEXT, preparation=_TEXT),
                "minItems": 3,
                "maxItems": 6,
            }
        ),
    ),
    (
        f"Extract the meeting's facts as JSON:\n\n{_MINUTES}",
        _object(
            chair_person=_TEXT,
            other_participants=_texts(5),
            amount_requested=_NUMBER,
            currency=_TEXT,
            next_action=_TEXT,
        ),
    ),
    (
        f"Extract the events of this log as JSON:\n\n{_LOG}",
        _object(
            events={
                "type": "array",
                "items": _object(
                    timestamp=_TEXT,
                    worker_name=_TEXT,
                    event_type={"enum": ["started", "finished", "failed", "moved"]},
                    job_number=_NUMBER,
                ),
                "minItems": 3,
                "maxItems": 5,
            }
        ),
    ),
    (
        "Extract the person's details as JSON: Maria Gonzalez, 34, is a software engineer from Madrid. She can be "
        "reached at maria.gonzalez@example.com, speaks Spanish and English, and likes climbing.",
        _object(
            first_name=_TEXT,
            last_name=_TEXT,
            age_in_years=_NUMBER,
            occupation=_TEXT,
            email_address=_TEXT,
            languages_spoken=_texts(4),
        ),
    ),
    (
        "Extract the order as JSON: Please send two boxes of blue pens and one stapler to 14 Mill Lane, Oxford, before "
        "Friday. Charge account 88213.",
        _object(
            order_items={
                "type": "array",
                "items": _object(product_name=_TEXT, quantity=_NUMBER),
                "minItems": 1,
                "maxItems": 4,
            },
            delivery_address=_TEXT,
            delivery_deadline=_TEXT,
            account_number=_NUMBER,
        ),
    ),
)
"""A request and the schema of its answer: names of properties as people write them, texts of bounded length."""
