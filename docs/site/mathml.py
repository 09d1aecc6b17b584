"""LaTeX to MathML, for the subset that the pages use: browsers draw MathML without a script or a font from elsewhere.

A command that is not in the tables below raises ValueError, so that `make site` fails instead of showing it raw.
"""

import html
import re

TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|[{}^_&'~]|\d+(?:\.\d+)?|[a-zA-Z]|\S", re.DOTALL)
OPERATORS = {
    "in": "∈", "times": "×", "cdot": "⋅", "cdots": "⋯", "ldots": "…", "dots": "…", "approx": "≈", "le": "≤", "ge": "≥",
    "ne": "≠", "to": "→", "rightarrow": "→", "mapsto": "↦", "sum": "∑", "prod": "∏", "pm": "±", "top": "⊤", "infty": "∞",
    "mid": "|", "odot": "⊙", "langle": "⟨", "rangle": "⟩", "{": "{", "}": "}", "|": "‖", "%": "%",
}  # fmt: skip
LETTERS = {
    "ell": "ℓ", "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ϵ", "eta": "η", "theta": "θ", "lambda": "λ",
    "mu": "μ", "pi": "π", "sigma": "σ", "tau": "τ", "phi": "φ", "omega": "ω", "Delta": "Δ", "Sigma": "Σ", "Omega": "Ω",
    "nabla": "∇", "partial": "∂",
}  # fmt: skip
FUNCTIONS = {"exp", "log", "max", "min", "sin", "cos", "softmax", "arg", "det"}
SPACES = {",": "0.17em", ":": "0.22em", ";": "0.28em", " ": "0.33em", "quad": "1em", "qquad": "2em", "!": "-0.17em"}
DOUBLE = {"R": "ℝ", "N": "ℕ", "Z": "ℤ", "E": "𝔼"}
STRETCHED = re.compile(r"[()\[\]|⟨⟩{}‖.]")


def bold(letter: str) -> str:
    """Return a letter in mathematical bold, upright; other characters unchanged."""
    for first, offset in (("A", 0x1D400), ("a", 0x1D41A), ("0", 0x1D7CE)):
        last = {"A": "Z", "a": "z", "0": "9"}[first]
        if first <= letter <= last:
            return chr(offset + ord(letter) - ord(first))
    return letter


class Parser:
    """Recursive descent over the tokens of one formula."""

    def __init__(self, source: str) -> None:
        self.source = source
        # Text keeps its spaces, so it is one token with its command.
        self.tokens = []
        position = 0
        text = re.compile(r"\\(?:text|mathrm|operatorname)\s*\{([^{}]*)\}")
        while position < len(source):
            if found := text.match(source, position):
                self.tokens.append("\\text:" + found[1])
                position = found.end()
            elif source[position].isspace():
                position += 1
            elif found := TOKEN.match(source, position):
                self.tokens.append(found[0])
                position = found.end()
        self.at = 0

    def peek(self) -> str | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def next(self) -> str:
        token = self.peek()
        if token is None:
            raise ValueError(f"the formula ends too early: {self.source!r}")
        self.at += 1
        return token

    def row(self, *ends: str) -> str:
        """Parse until one of the ends, which is left unread."""
        parts = []
        while (token := self.peek()) is not None and token not in ends:
            parts.append(self.scripted())
        return "<mrow>" + "".join(parts) + "</mrow>"

    def group(self) -> str:
        """Parse the argument of a command: a group in braces or one token."""
        if self.peek() != "{":
            return self.atom()
        self.next()
        inside = self.row("}")
        self.next()
        return inside

    def scripted(self) -> str:
        """Parse an atom with its subscript, superscript and primes."""
        base = self.atom()
        below = above = ""
        while (token := self.peek()) in ("_", "^", "'"):
            self.next()
            if token == "_":
                below = self.group()
            elif token == "^":
                above = self.group()
            else:
                base = f"<mrow>{base}<mtext>ʹ</mtext></mrow>"  # a letter that is raised in every font
        if below and above:
            return f"<msubsup>{base}{below}<mrow>{above}</mrow></msubsup>"
        if below:
            return f"<msub>{base}{below}</msub>"
        return f"<msup>{base}<mrow>{above}</mrow></msup>" if above else base

    def atom(self) -> str:
        token = self.next()
        if token == "{":
            self.at -= 1
            return self.group()
        if token.startswith("\\text:"):
            return f"<mtext>{html.escape(token[6:])}</mtext>"
        if token.startswith("\\"):
            return self.command(token[1:])
        if token[0].isdigit():
            return f"<mn>{token}</mn>"
        if token.isalpha():
            return f"<mi>{token}</mi>"
        if token == "~":
            return '<mspace width="0.33em"/>'
        if token in "}&^_":
            raise ValueError(f"unexpected {token!r} in the formula {self.source!r}")
        stretchy = ' stretchy="false"' if STRETCHED.match(token) else ""
        return f"<mo{stretchy}>{html.escape({'-': '−', '*': '∗'}.get(token, token))}</mo>"

    def command(self, name: str) -> str:
        if name in SPACES:
            return f'<mspace width="{SPACES[name]}"/>'
        if name in LETTERS:
            return f"<mi>{LETTERS[name]}</mi>"
        if name in OPERATORS:
            return f"<mo>{OPERATORS[name]}</mo>"
        if name in FUNCTIONS:
            return f"<mi>{name}</mi>"
        if name == "frac":
            return f"<mfrac>{self.group()}{self.group()}</mfrac>"
        if name == "sqrt":
            return f"<msqrt>{self.group()}</msqrt>"
        if name in ("mathbf", "mathbb", "hat", "bar"):
            inside = self.group()
            if name in ("hat", "bar"):
                return f"<mover>{inside}<mo>{'^' if name == 'hat' else '¯'}</mo></mover>"
            letter = (lambda found: DOUBLE[found[1]]) if name == "mathbb" else (lambda found: bold(found[1]))
            return re.sub(r"(?<=>)(\w)(?=<)", letter, inside).replace("<mi>", '<mi mathvariant="normal">')
        if name == "left":
            opening, inside = self.fence(), self.row("\\right")
            self.next()
            return f"<mrow>{opening}{inside}{self.fence()}</mrow>"
        if name == "begin":
            return self.table("".join(iter(self.next, "}"))[1:])
        raise ValueError(f"unknown command \\{name} in the formula {self.source!r}")

    def fence(self) -> str:
        token = self.next()
        token = OPERATORS[token[1:]] if token.startswith("\\") else token
        return "" if token == "." else f'<mo stretchy="true">{html.escape(token)}</mo>'

    def table(self, kind: str) -> str:
        """Parse an aligned environment: columns in pairs, right and left."""
        if kind not in ("aligned", "align"):
            raise ValueError(f"unknown environment {kind} in the formula {self.source!r}")
        rows, cells = [], []
        while True:
            cells.append(self.row("&", "\\\\", "\\end"))
            token = self.next()
            if token == "&":
                continue
            rows.append(cells)
            cells = []
            if token == "\\end":
                "".join(iter(self.next, "}"))
                break
        sides = ("right", "left")
        lines = [
            "".join(f'<mtd class="{sides[column % 2]}">{cell}</mtd>' for column, cell in enumerate(row)) for row in rows
        ]
        return "<mtable>" + "".join(f"<mtr>{line}</mtr>" for line in lines) + "</mtable>"


def to_mathml(source: str, block: bool = False) -> str:
    """Return the MathML of a formula in LaTeX; ValueError for what is not in the subset."""
    parser = Parser(source.strip())
    content = parser.row()
    display = ' display="block"' if block else ""
    annotation = f'<annotation encoding="application/x-tex">{html.escape(source.strip())}</annotation>'
    return f"<math{display}><semantics>{content}{annotation}</semantics></math>"


def convert_formulas(page: str) -> str:
    """Return an HTML page with the formulas that pymdownx.arithmatex marked as MathML."""

    def replace(found: re.Match) -> str:
        source = html.unescape(found["source"])
        return f'<{found["tag"]} class="math">{to_mathml(source, found["tag"] == "div")}</{found["tag"]}>'

    marked = r'<(?P<tag>div|span) class="arithmatex">\\[\[(](?P<source>.*?)\\[\])]</(?P=tag)>'
    return re.sub(marked, replace, page, flags=re.DOTALL)
