"""Built-in prompts: beginnings of Python code and of English prose, about 30 to 60 tokens each.

Owns texts only. They are beginnings of what the demo target was trained on in kind (modules
like the standard library's, prose like the World English Bible's), but written for this file.
"""

from __future__ import annotations

CODE: tuple[str, ...] = (
    '''class Stack:
    """A last-in, first-out list."""

    def __init__(self, items=None):
        self._items = list(items or [])

    def push(self, item):
''',
    '''"""Read and write comma-separated tables."""

import csv
import io
import os
import sys

__all__ = ["read_table", "write_table"]


def read_table(path, encoding="utf-8"):
''',
    '''def binary_search(items, key, lo=0, hi=None):
    """Return the index of key in the sorted list items, or -1."""
    if hi is None:
        hi = len(items)
    while lo < hi:
''',
    """class TestQueue(unittest.TestCase):

    def setUp(self):
        self.queue = Queue(maxsize=4)

    def test_put_and_get(self):
        self.queue.put(1)
        self.assertEqual(""",
    """def main():
    parser = argparse.ArgumentParser(description="Count the words of files.")
    parser.add_argument("files", nargs="*", help="the files to read")
    parser.add_argument("-v", "--verbose", action="store_true")
""",
    """class Node:
    __slots__ = ("key", "value", "left", "right")

    def __init__(self, key, value):
        self.key = key
        self.value = value
        self.left = None
""",
    '''    def readline(self, size=-1):
        """Read a line of bytes, at most size of them.

        If size is negative, the whole line is read.
        """
        if self.closed:
            raise ValueError("I/O operation on closed file")
''',
    '''def _parse_header(line):
    """Split a header line into its name and its value."""
    name, sep, value = line.partition(":")
    if not sep:
        raise ValueError("bad header: %r" % line)
''',
    '''class Connection:
    """A connection to a server, with a timeout."""

    def __init__(self, host, port=None, timeout=10):
        self.host = host
        self.port = port
        self.timeout = timeout
        self.sock = None

    def connect(self):
''',
    '''def walk(top, topdown=True, onerror=None):
    """Yield (directory, names of directories, names of files) for each directory."""
    try:
        entries = os.listdir(top)
    except OSError as error:
        if onerror is not None:
''',
    '''class Fraction(numbers.Rational):
    """A number with a numerator and a denominator."""

    def __add__(self, other):
        if isinstance(other, int):
            other = Fraction(other)
        if not isinstance(other, Fraction):
            return NotImplemented
''',
    '''def format_date(year, month, day):
    """Return the date as a string in ISO format."""
    if not 1 <= month <= 12:
        raise ValueError("month must be in 1..12")
    if not 1 <= day <= 31:
''',
    '''class LRUCache(dict):
    """A mapping that forgets the keys that were used least recently."""

    def __init__(self, maxsize=128):
        super().__init__()
        self.maxsize = maxsize

    def __getitem__(self, key):
''',
    '''import threading
import time


class Timer(threading.Thread):
    """Call a function after a number of seconds."""

    def __init__(self, interval, function, args=None):
        threading.Thread.__init__(self)
        self.interval = interval
''',
    '''def quote(string, safe="/", encoding=None, errors=None):
    """Replace special characters in string by %xx escapes."""
    if isinstance(string, str):
        if not string:
            return string
        if encoding is None:
''',
    """    def test_invalid_arguments(self):
        self.assertRaises(TypeError, self.func)
        self.assertRaises(TypeError, self.func, 1, 2, 3)
        self.assertRaises(ValueError, self.func, -1)
""",
    """class Tokenizer:

    def __init__(self, source):
        self.source = source
        self.pos = 0
        self.line = 1

    def next_token(self):
        while self.pos < len(self.source):
            char = self.source[self.pos]
""",
    '''def mean(data):
    """Return the arithmetic mean of data.

    >>> mean([1, 2, 3, 4])
    2.5
    """
    data = list(data)
    n = len(data)
    if n < 1:
''',
    '''async def gather_results(tasks, *, timeout=None):
    """Wait for the tasks and return what each returned."""
    loop = asyncio.get_running_loop()
    results = []
    for task in tasks:
''',
    '''class Handler(BaseHandler):
    """Write log records to a file."""

    def __init__(self, filename, mode="a"):
        BaseHandler.__init__(self)
        self.filename = os.path.abspath(filename)
        self.mode = mode

    def emit(self, record):
''',
)

PROSE: tuple[str, ...] = (
    "In those days a man of the hill country went down to the city with his two sons, and he said to the elder, "
    '"Go and speak to the keeper of the gate,',
    "It happened, when the king heard the words of the messengers, that he tore his clothes, and sent for the elders "
    "of the land, and said to them,",
    "Blessed is the man who walks in the way of wisdom, and whose feet do not turn aside. He shall be like",
    "These are the names of the children of Israel who came up out of the land with their flocks and their herds:",
    "Then the prophet stood before all the people, and lifted up his voice, and cried out, "
    '"Hear this, you who dwell in the land!',
    "Now there was a certain widow in that city, and her son was sick; and she came to him by night, weeping, and",
    'The word of the Lord came to me, saying, "Son of man, set your face toward the mountains, and say to them,',
    "My son, listen to the instruction of your father, and do not forsake the teaching of your mother; for they",
    'He answered them with a parable: "A sower went out into his field, and as he sowed, some of the seed fell',
    "In the third year of the reign of the king, in the first month, on the tenth day of the month, the army came",
    "Give thanks to the Lord, for he is good; for his loving kindness endures forever. Let the house of Aaron now say",
    "They journeyed from there, and encamped by the waters on the border of the wilderness; and the people murmured,",
    "Then she arose early in the morning, and took bread and a skin of water, and went out to the place where",
    "Brothers, I do not want you to be unaware, that our fathers were all under the cloud, and all passed through",
    'The king said to the woman, "Do not be afraid. What do you see?" The woman said to the king, "I see',
    "When he had finished speaking all these words to the multitude, he entered into a boat with his disciples, and",
    "And the length of the court shall be one hundred cubits, and the width fifty everywhere, and the height",
    "Woe to those who build a house by unrighteousness, and its rooms by injustice; who use their neighbor's service",
    "So David and his men arose, and departed from the city, and went wherever they could go. It was told to Saul that",
    "For this cause I bow my knees before the Father, that he would grant you, according to the riches of his glory,",
)
