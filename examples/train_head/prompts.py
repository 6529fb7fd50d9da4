"""Build prompts from texts that are at hand and free; README.md lists the sources.

    python examples/train_head/prompts.py prompts.jsonl.xz --books BOOK.txt ...

A target that chats gets three domains: chat, code and prose. A target without a chat template gets one, `source`: the
beginnings of Python functions. Held-out prompts are about topics, files and passages that no other prompt is about, by
a hash of their names.
"""

import argparse
import ast
import collections
import hashlib
import importlib.util
import itertools
import json
import lzma
import random
import re
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

LIBRARIES = "networkx", "sympy", "numpy"  # under the BSD license; installed with PyTorch
HELD_OUT = 0.08  # share of topics, files and passages

TOPICS = """
the water cycle; photosynthesis; gravity; black holes; the Roman Empire; the French Revolution; compound interest;
inflation; renewable energy; electric cars; vaccines; the immune system; sleep; meditation; time management; public
speaking; job interviews; writing a resume; learning a new language; playing the guitar; painting with watercolors;
growing tomatoes; composting; baking bread; making pasta; healthy breakfasts; vegetarian dinners; training for a
marathon; yoga; strength training; swimming; chess; poker; board games; video games; the Olympic Games; football;
tennis; hiking in the mountains; camping; traveling to Japan; a trip to Paris; visiting New York; the Great Wall of
China; the pyramids of Egypt; volcanoes; earthquakes; hurricanes; climate change; recycling; plastic pollution;
endangered species; whales; bees; elephants; cats; training a puppy; aquariums; dinosaurs; evolution; DNA; genetics;
the human heart; the brain; memory; stress; anxiety; friendship; forgiveness; leadership; teamwork; negotiation;
marketing; starting a small business; writing a business plan; saving money; paying off debt; investing for
retirement; buying a house; renting an apartment; home repair; cleaning the kitchen; organizing a closet; planning a
wedding; a birthday party; gift ideas; writing poetry; writing a novel; Shakespeare; fairy tales; Greek mythology;
science fiction; film making; photography; jazz; classical music; hip hop; the piano; dance; architecture; fashion;
coffee; tea; chocolate; cheese; wine; sushi; curry; pizza; artificial intelligence; machine learning; neural networks;
computers; the internet; cybersecurity; passwords; smartphones; social media; open source software; databases;
operating systems; robots; space travel; the moon landing; Mars; the solar system; stars; telescopes; atoms; the
periodic table; water; salt; iron; gold; electricity; magnets; light; sound; heat; engines; airplanes; trains;
bicycles; ships; bridges; maps; calendars; clocks; money; taxes; democracy; the constitution; human rights; education;
homework; studying for an exam; mathematics; fractions; percentages; the Pythagorean theorem; statistics; probability;
algebra; geometry; calculus; logic; philosophy; ethics; happiness; religion; history; archaeology; anthropology;
geography; oceans; rivers; deserts; rain forests; islands; Antarctica; Africa; Australia; India; China; Brazil;
Canada; Mexico; Italy; Germany; Spain; Greece; Albert Einstein; Marie Curie; Isaac Newton; Leonardo da Vinci;
Cleopatra; Napoleon; Abraham Lincoln; Nelson Mandela; Mahatma Gandhi; the Industrial Revolution; World War I; the Cold
War; the Renaissance; the Silk Road; the printing press; the steam engine; the telephone; penicillin; surgery;
dentists; nutrition; vitamins; sugar; exercise; headaches; allergies; the common cold; first aid; babies; teenagers;
parenting; grandparents; neighbors; working from home; meetings; email; feedback; conflicts at work; burnout; remote
teams; hiring; customer service; online shopping; advertising; supply chains; farming; forests; gardens; bird
watching; fishing; sailing; skiing; surfing; knitting; sewing; pottery; woodworking; origami; magic tricks; puzzles;
jokes; dreams; habits; motivation; creativity; curiosity; patience; courage; honesty; kindness; gratitude; loneliness;
grief; love; trust
"""

CHAT = """
What is {}? Explain it in simple terms.
Give me five tips about {}.
Explain {} to a ten-year-old.
What are the advantages and disadvantages of {}?
What are the most important facts about {}?
Write a short list of common mistakes that people make with {}.
How does {} affect our everyday life?
Can you recommend some ways to learn more about {}?
Write a short dialogue between two friends who talk about {}.
I have to give a five-minute talk on {}. Can you write an outline?
What questions should I ask an expert on {}?
Summarize the history of {} in one paragraph.
Write ten quiz questions about {} with their answers.
Why do people care about {}?
What would the world be like without {}?
Compare {} with something similar.
I am a beginner. How do I start with {}?
What is the best way to explain {} in class?
Give me three interesting stories about {}.
What do most people get wrong about {}?
Make a table of pros and cons of {}.
Write a step-by-step plan for a project on {}.
Who should know about {}, and why?
What words are often used when people talk about {}? Define each of them.
How will {} change in the next fifty years?
Tell me something surprising about {}.
My friend says that {} is boring. What should I reply?
Help me to write a message to a colleague about {}.
How can a family talk about {} at dinner?
What is the first thing that comes to mind about {}?
"""

TASKS = """
Write a short essay about {}.
Write the first paragraph of a novel in which {} is important.
Write a story about a child who discovers {}.
Write a poem about {}.
Write a letter to a newspaper about {}.
Write a review of a book on {}.
Write a speech about {} for a graduation.
Write a news article on {}.
Write a diary entry of somebody who thinks about {} all day.
Describe {} as if you saw it for the first time.
Write an encyclopedia article about {}.
Write a fable about {} with a moral at the end.
"""

PASSAGES = """
Summarize the following passage in two sentences.
Rewrite the following passage in simple, modern English.
Continue the following text.
What is the main idea of the following passage?
Make a list of the key points of the following text.
Rewrite the following text so that it is half as long.
Correct the grammar of the following text and write it again.
Write a title and a one-sentence summary for the following passage.
Write three questions about the following passage, and answer them.
"""

WRITE = """
Write a Python function `{signature}`. {about}
Write a Python function named `{name}` with the following documentation: {about}
Implement this function in Python, with type hints: {about} Its signature is `{signature}`.
Write `{name}` in Python, and three unit tests for it. {about}
"""

READ = """
Explain what this Python code does:
Add a docstring and comments to this function:
Rewrite this function with type hints:
Write unit tests for this function:
Find possible bugs in this code, and correct them:
Simplify this code:
Translate this Python function to JavaScript:
"""


class Prompt(NamedTuple):
    """A prompt, and the name of what it is about."""

    domain: str
    about: str
    text: str


def lines(text: str, separator: str = "\n") -> list[str]:
    """Return the lines of a list above."""
    return [line for part in text.split(separator) if (line := " ".join(part.split()))]


def is_held_out(name: str) -> bool:
    """Return whether prompts about this are held out."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) < HELD_OUT * 2**32


def chats() -> Iterator[Prompt]:
    """Yield questions about topics."""
    for topic in lines(TOPICS, ";"):
        yield from (Prompt("chat", topic, template.format(topic)) for template in lines(CHAT))


def source_beginnings(files: Iterable[tuple[str, ast.Module, str]]) -> Iterator[Prompt]:
    """Yield beginnings of functions, for a target that continues code."""
    for name, tree, text in files:
        source = text.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= 6:
                yield Prompt("source", name, "\n".join(source[node.lineno - 1 : node.lineno + 4]) + "\n")


def python_files() -> Iterator[tuple[str, ast.Module, str]]:
    """Yield the name, tree and text of modules of the standard library and of LIBRARIES, without their tests."""
    roots = {"python": Path(sysconfig.get_path("stdlib"))}
    for library in LIBRARIES:
        spec = importlib.util.find_spec(library)
        if spec is not None and spec.origin is not None:
            roots[library] = Path(spec.origin).parent
    for library, root in roots.items():
        for path in sorted(root.rglob("*.py")):
            parts = set(path.relative_to(root).parts)
            if parts & {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"}:
                continue
            try:
                text = path.read_text()
                yield f"{library}/{path.relative_to(root)}", ast.parse(text), text
            except (UnicodeDecodeError, SyntaxError):
                continue


def functions(files: Iterable[tuple[str, ast.Module, str]]) -> Iterator[Prompt]:
    """Yield tasks to write a function from its documentation, and to read one."""
    for name, tree, text in files:
        source = text.splitlines()
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            about = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            code = textwrap.dedent("\n".join(source[node.lineno - 1 : node.end_lineno]))
            fields = {"name": node.name, "signature": f"{node.name}({ast.unparse(node.args)})"[:120], "about": about}
            if 30 <= len(about) <= 240:
                yield from (Prompt("code", name, template.format(**fields)) for template in lines(WRITE))
            if 150 <= len(code) <= 900:
                code = f"\n\n```python\n{code.strip()}\n```"
                yield from (Prompt("code", name, template + code) for template in lines(READ))


def passages(texts: Iterable[tuple[str, str]], limit: int = 1000) -> Iterator[tuple[str, str]]:
    """Yield the names and texts of passages of whole paragraphs."""
    for name, text in texts:
        passage = ""
        for paragraph in (" ".join(part.split()) for part in re.split(r"\n\s*\n", text)):
            if re.search(r">>>|[=_*`^|\\]{2}", paragraph) or not paragraph[:1].isalpha():
                continue
            if len(passage) >= 250:
                yield f"{name}: {passage[:40]}", passage
                passage = ""
            if len(passage) + len(paragraph) < limit:
                passage += "\n\n" * bool(passage) + paragraph


def proses(books: list[Path], files: Iterable[tuple[str, ast.Module, str]]) -> Iterator[Prompt]:
    """Yield tasks about passages of books and of documentation, and topics to write about."""
    docs = []
    for name, tree, _ in files:
        nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef))
        docs.append((name, "\n\n".join(doc for node in nodes if (doc := ast.get_docstring(node)))))
    for name, passage in passages([*((book.name, book.read_text()) for book in books), *docs]):
        for template in lines(PASSAGES):
            yield Prompt("prose", name, f"{template}\n\n{passage}")
    for topic in lines(TOPICS, ";"):
        yield from (Prompt("prose", topic, template.format(topic)) for template in lines(TASKS))


def choose(prompts: Iterable[Prompt], count: int, rng: random.Random) -> list[Prompt]:
    """Return this many prompts, by turns about each thing and with each template as long as there are some."""
    by_about: dict[str, dict[str, Prompt]] = collections.defaultdict(dict)
    for prompt in prompts:
        by_about[prompt.about][prompt.text] = prompt
    queues = [list(texts.values()) for texts in by_about.values()]
    for queue in queues:
        rng.shuffle(queue)
    rng.shuffle(queues)
    chosen: list[Prompt] = []
    while queues and len(chosen) < count:
        queues = [queue for queue in queues if queue]
        chosen += [queue.pop() for queue in queues]
    return chosen[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--books", type=Path, nargs="*", default=[], help="plain texts for tasks about passages")
    parser.add_argument("--domains", nargs="+", default=["chat", "code", "prose"], help="of chat, code, prose, source")
    parser.add_argument("--max-files", type=int, help="read the first Python files only")
    parser.add_argument("--train", type=int, default=6000, help="prompts of each domain")
    parser.add_argument("--held-out", type=int, default=200, help="prompts of each domain")
    args = parser.parse_args()
    rng, files = random.Random(0), list(itertools.islice(python_files(), args.max_files))
    prompts_of = {
        "chat": chats,
        "code": lambda: functions(files),
        "prose": lambda: proses(args.books, files),
        "source": lambda: source_beginnings(files),
    }
    if unknown := set(args.domains) - set(prompts_of):
        parser.error(f"unknown domains: {', '.join(sorted(unknown))}")
    written = []
    for domain in args.domains:
        of_split: dict[str, list[Prompt]] = {"train": [], "held_out": []}
        for prompt in prompts_of[domain]():
            of_split["held_out" if is_held_out(prompt.about) else "train"].append(prompt)
        for split, count in ("train", args.train), ("held_out", args.held_out):
            prompts = choose(of_split[split], count, rng)
            written += [{"domain": domain, "split": split, "prompt": prompt.text} for prompt in prompts]
            print(f"{domain} {split}: {len(prompts)} of {len(of_split[split])}")
    rng.shuffle(written)
    with lzma.open(args.out, "wt") as file:
        file.writelines(json.dumps(prompt) + "\n" for prompt in written)


if __name__ == "__main__":
    main()
