"""Forty prompts of four kinds that no draft was trained on: code, chat, creative writing, technical documentation."""

from typing import Final

KINDS: Final[dict[str, tuple[str, ...]]] = {
    "code": (
        "Write a Python function that returns the longest word of a sentence.",
        "Write a Python class for a stack with push, pop and peek.",
        "Show a bash loop that renames all .txt files in a folder to .md.",
        "Write an SQL query that counts the orders of each customer in 2023.",
        "Write a JavaScript function that removes duplicates from an array.",
        "Explain what this does: [x * x for x in range(10) if x % 2 == 0]",
        "Write a C function that reverses a string in place.",
        "Write a Python test with pytest for a function add(a, b).",
        "How do I read a JSON file in Python and print one of its fields?",
        "Write an HTML page with a heading, a paragraph and a list of three links.",
    ),
    "chat": (
        "Hello! What can you help me with today?",
        "I slept badly and have a long meeting ahead. Any advice?",
        "What should I cook tonight with rice, eggs and spinach?",
        "My friend forgot my birthday. Should I say something?",
        "Can you recommend a weekend trip for a family with small children?",
        "I want to learn the guitar. How should I start?",
        "What is the difference between a cold and the flu?",
        "Help me write a short message to thank my neighbour for feeding the cat.",
        "Why do cats purr?",
        "I have a job interview tomorrow. How can I prepare?",
    ),
    "creative": (
        "Write a short story about a lighthouse keeper who finds a letter.",
        "Write a poem about the first snow of the year.",
        "Describe a market in a city that floats on a lake.",
        "Write the opening of a mystery set in a small railway station.",
        "Invent a legend that explains why the moon has dark spots.",
        "Write a dialogue between a river and a bridge.",
        "Tell a story about a robot that learns to paint.",
        "Write a letter from a grandmother to her grandson who has moved abroad.",
        "Describe an old library at night, using all five senses.",
        "Write a short tale about two foxes and a lost key.",
    ),
    "documentation": (
        "Write installation instructions for a command line tool on Linux.",
        "Explain how a TCP connection is opened, step by step.",
        "Describe the difference between a process and a thread.",
        "Write a README for a library that parses dates.",
        "Explain what a load balancer does and when it is needed.",
        "Document a REST endpoint that creates a user, with its fields and errors.",
        "Explain how to back up and restore a database.",
        "Describe how caching works in a web browser.",
        "Write a troubleshooting guide for a printer that does not print.",
        "Explain what a hash table is and how it handles collisions.",
    ),
}
