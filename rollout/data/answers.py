"""Answers: response text -> the answer that the response states, as text. Bounded string work; nothing is executed."""

from __future__ import annotations

import re
from decimal import Decimal
from unicodedata import normalize as compatible

ANSWER_MARK = "####"
TAIL_CHARS = 300
"""Characters at the end of a response in which the answer must stand; bounds the work on a response of any length."""
BOXED_TAIL_CHARS = 2000
"""Characters at the end of a response in which the last boxed expression must begin."""
MAX_EXPRESSION_CHARS = 400
"""Longest possible answer, characters; a longer expression could only keep a parser busy."""

THOUGHT_MARKS = (
    "<think>", "<thinking>", "<thought>", "<reasoning>", "<seed:think>", "[think]", "◁think▷", "<|begin_of_thought|>",
)  # fmt: skip
"""Marks of several model families, in lower case, that open a thought; </think> and its like close one."""
_OPENS = "|".join(map(re.escape, THOUGHT_MARKS))
_CLOSES = r"</(?:think|thinking|thought|reasoning|seed:think)>|\[/think\]|◁/think▷|<\|end_of_thought\|>"
THOUGHT = re.compile(f"(?P<opens>{_OPENS})|{_CLOSES}", re.IGNORECASE)

_FULL_WIDTH = {chr(each + 0xFEE0): chr(each) for each in b"0123456789$%+-/:="}
_PLAIN = str.maketrans(_FULL_WIDTH | {"\N{MINUS SIGN}": "-", "\N{SMALL HYPHEN-MINUS}": "-"})
_SIGN_DASH = re.compile(r"(?<![\w)\]}])[\u2010-\u2013](?=[$.]?[0-9])")
_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|,?\\[,;:! ]|[\u00a0\u2007\u2009\u202f])(?=[0-9]{3}(?![0-9]))")

_DIGITS = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![\w.])\.[0-9]+)"
_MONEY = r"(?:\\?[$€£¥])?"
_RAISED = "\u00b2\u00b3\u00b9\u2070-\u2079\u00bc-\u00be\u2150-\u215e"
"""Exponents and fractions of one character, for a class of characters: 18² and 2½ are not 18 and 2."""
_OPERATOR = "[\u00b1\u00d7\u00f7\u00b7\u22c5\u2219\u2022\u2715\u2044\u2215\u2236\u02c6\uff0f]"
_PART = "\u03c0\u207f"
"""Pi and the sign of a power, for a class of characters."""
_GOES_ON = (
    rf"[ \t]*(?:[{_RAISED}{_PART}\u221a]|\\(?:[dtc]?frac|nicefrac|sfrac|sqrt|pi|pm|binom)"
    rf"|(?:{_OPERATOR}|~|\\?,|\\[;: ]|x)[ \t]*[0-9(]"
    r"|['\u2019_\uff0c\u2009][0-9])|x[0-9A-Fa-f]|[ \t]+(?:(?:or|and|to)[ \t]+)?[0-9]"
)
"""What makes another number, or two, of what stands before it: 2\\frac{1}{2}, 2π, 3·4, 1'800, 18 to 20, 18, 20."""
_NUMBER = re.compile(
    rf"[-+]?{_MONEY}[-+]?{_DIGITS}"
    # The number must end here: "3/4" is not 3, "18 * 2" and 18:30 are not 18, "1.2.3" is not 1.2, "1,23" is not 1.
    rf"(?![0-9{_RAISED}]|[.,:][0-9]|[eE][-+]?[0-9]|[ \t]*\^|\*[A-Za-z(\\]|{_GOES_ON}"
    r"|[ \t]*(?:[-+*/\u00d7\u00f7\u2010-\u2015]|\\times|\\cdot|\\div)+[ \t]*[0-9(\\])"
)
_LEADING = re.compile(r"(?:[\s*_`(\[{$\\]|boxed|fbox|text(?:bf)?|math(?:bf|rm))*")
_FREE_NUMBER = re.compile(
    # No answer: the power of a unit or of a variable, and an index.
    r"(?<![A-Za-z])(?:[mcdk]?m|in|ft|yd|mi)[23](?![0-9])|(?<=[A-Za-z)\]}])\^\{?[-+]?[0-9.]+|_\{?[0-9]+"
    # An answer that is not one number.
    r"|(?P<other>\\(?:[dtc]?frac|nicefrac|sfrac|binom)\s*(?:\{[^{}]*\}|[0-9])\s*(?:\{[^{}]*\}|[0-9])"
    r"|(?:\\sqrt(?:\[[0-9]+\])?|[√∛∜])\s*\{?[0-9]+"
    rf"|[\u00bc-\u00be\u2150-\u215e])"
    rf"|(?P<number>(?:(?<![\w)\]}}.-])[-+])?(?:\\?[$€£¥][-+]?[ ]?)?{_DIGITS}(?:[eE][-+]?[0-9]{{1,2}}(?![0-9]))?)"
    # What makes another number of it: 1/2, 10^3, 10:30, 1.2.3, 1,00,000, 1'800, 2², 2π.
    rf"(?P<joined>(?:(?:[ \t]*(?:\\?/|\^\{{?|{_OPERATOR})[ \t]*|[ \t]?\*\*[ \t]?|[ \t]:[ \t]|[:.,eE'\u2019_\uff0c])"
    rf"[-+]?[0-9]+)+|[ \t]*(?:[{_RAISED}{_PART}]|\\pi))?"
)
_DAPO_ANSWER = re.compile(r"answer[*_`\s]*:(?:[*_`}\s]|\\\[|\$\$)*", re.IGNORECASE)
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")


STATEMENT = re.compile(
    r"####|<<[^<>]*=|^\s*[\[{]\s*[\"']|\banswer\b\s*(?:is\b|[:=])\s*[-+$\\]*[0-9b]"
    r"|^\s*(?:(?:array|tensor|np\.\w+|decimal|fraction)\(|(?:nan|<na>|nat|[-+]?inf)\s*$)",
    re.IGNORECASE,
)
"""What makes a reference more than an answer, or none: the solution of GSM8K, JSON, a list of Python, a sentence about
it, what numpy and pandas write for an array, a number of theirs, infinity and a cell without a value."""
_OPENS_LINE = re.compile(rf"(?:^|[\n>\]\uff5c\u25b7])\s*(?:{_OPENS})", re.IGNORECASE)


def stated(response: str, prompt: str = "") -> str | None:
    """What the response says after its thoughts; None if it ends inside of a thought, which states no answer.

    A thought is opened by the response, or by a prompt: chat templates write one of THOUGHT_MARKS at its end, and a
    message that goes on may begin with one. A mark in the middle of a line is an instruction about thoughts.
    """
    if marks := list(THOUGHT.finditer(response)):
        return None if marks[-1]["opens"] else response[marks[-1].end() :]
    asked = list(THOUGHT.finditer(prompt))
    if not asked or not asked[-1]["opens"]:
        return response
    ends_so = not prompt[asked[-1].end() :].strip()
    return None if ends_so or _OPENS_LINE.match(prompt, max(0, asked[-1].start() - 1)) else response


_WORD = re.compile(r"^[\w.,]*")


def _tail(text: str, most: int) -> str:
    """The last `most` characters at most, without a word or a number that they would cut."""
    if len(text) <= most:
        return text
    end = text[-most:]
    return end if text[-most - 1].isspace() else _WORD.sub("", end, count=1)


def bare(answer: str) -> str:
    """The answer without a full stop, and the stars of Markdown, around it."""
    return answer.strip(" *").removesuffix(".")


def plain_signs(text: str) -> str:
    """The text with digits, signs and separators of thousands in the form that ASCII has for them.

    A dash (U+2010 to U+2013) is a minus where a sign stands, not between two numbers. Full-width commas and full stops
    stay, because they end a clause.
    """
    return _THOUSANDS.sub(",", _SIGN_DASH.sub("-", text.translate(_PLAIN)))


_RAISED_RUN = re.compile("[\u207a\u207b\u00b2\u00b3\u00b9\u2070-\u2079\u207f]+")
_FRACTION = re.compile("[\u00bc-\u00be\u2150-\u215e]")
_ROOT = re.compile(r"(?P<sign>[√∛∜])\s*(?:\((?P<inner>[^()]*)\)|(?P<one>[0-9]+(?:\.[0-9]+)?|[A-Za-z]))")
_ROOTS = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}
_MIXED = re.compile(r"\A\s*([-+]?[0-9]+)\s+([0-9]+)/([0-9]+)\s*\Z")
_REPEATING = re.compile(r"(?<![0-9,])([0-9]*)\.([0-9]*)\\(?:overline|bar)\s*\{([0-9]+)\}")
_SCIENTIFIC = re.compile(r"\A\s*([-+]?[0-9]+(?:\.[0-9]+)?)[eE]\+?(-?[0-9]+)\s*\Z")
_TRUTH = re.compile(r"\A\s*(?:\\text\w*\s*\{)?\s*(true|false)\s*\}?\s*\Z", re.IGNORECASE)
_PERCENT, _DEGREES = re.compile(r"(?<!\\)%"), re.compile(r"\s*(?:°(?:\s*[CF]\b)?|\\degree(?![A-Za-z]))")
_IN_LATEX = str.maketrans(
    {"∞": r"\infty ", "\u222a": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset "}
    | dict.fromkeys("\u2044\u2215", "/")
    | dict.fromkeys("·⋅∙", r"\cdot ") | dict.fromkeys("€£¥", r"\$")
)  # fmt: skip


def latex_signs(text: str) -> str:
    """An expression with the signs of Unicode, and a mixed number such as 2 1/2, in LaTeX: math-verify reads no other.

    2½ is 2\\frac{1}{2}, x² is x^{2}, √(x+1) is \\sqrt{x+1}, 90° is 90^\\circ, and 0.\\overline{3} is \\frac{3}{9}.
    """
    text = _SCIENTIFIC.sub(r"\1\\times10^{\2}", _MIXED.sub(r"\1\\frac{\2}{\3}", plain_signs(text)))
    text = _NAMED_UNIT.sub("", _together(text)).replace(r"\varnothing", r"\emptyset")
    text = _FRACTION.sub(lambda found: r"\frac{{{}}}{{{}}}".format(*compatible("NFKC", found[0]).split("\u2044")), text)
    text = _RAISED_RUN.sub(lambda found: f"^{{{compatible('NFKC', found[0])}}}", text)
    text = _ROOT.sub(lambda found: f"{_ROOTS[found['sign']]}{{{found['inner'] or found['one'] or ''}}}", text)
    text = _TRUTH.sub(lambda found: f"\\text{{{found[1].lower()}}}", _REPEATING.sub(_repeating, text))
    text = _PERCENT.sub(r"\\%", _DEGREES.sub(r"^\\circ ", text))
    return text.replace("\N{MINUS SIGN}", "-").translate(_IN_LATEX).strip()


def _repeating(found: re.Match[str]) -> str:
    """A repeating decimal as a fraction."""
    whole, once, again = found.groups()
    over = 10 ** len(once) * (10 ** len(again) - 1)
    return rf"\frac{{{int(whole + once + again) - int(f'0{whole}{once}')}}}{{{over}}}"


def to_number(text: str, *, whole: bool) -> Decimal | None:
    """The number at the beginning of `text`, or, if `whole`, the number that makes up all of `text`."""
    stripped = plain_signs(text).strip()
    found = _NUMBER.fullmatch(stripped) if whole else _NUMBER.match(stripped)
    return None if found is None else _value(found.group())


def _value(written: str) -> Decimal | None:
    """The value of a number as it is written; None for two signs."""
    text = re.sub(r"[,\\$€£¥ ]", "", written)
    return None if text.startswith(("--", "-+", "+-", "++")) else Decimal(text)


def marked_number(response: str) -> str | None:
    """The number directly after the last "####" of the response's end; see `rollout/rewards/answer_rules.py`, gsm8k.

    Signs of currency, thousands commas and ornaments around the number are removed. Source: the format of GSM8K (Cobbe
    et al., arXiv:2110.14168).
    """
    _, mark, tail = _tail(response, TAIL_CHARS).rstrip("# \t\r\n").rpartition(ANSWER_MARK)
    number = to_number(_LEADING.sub("", tail, count=1), whole=False) if mark else None
    return None if number is None else plain_number(number)


def last_number(response: str) -> str | None:
    """The last number of the response's end, whatever text surrounds it; None if it is part of another, as 2 of 1/2."""
    found = None
    for each in _FREE_NUMBER.finditer(plain_signs(_tail(response, TAIL_CHARS))):
        found = each if each["number"] or each["other"] else found
    if found is None or found["other"] or found["joined"]:
        return None
    number = _value(found["number"])
    return None if number is None else plain_number(number)


def boxed(response: str) -> str | None:
    r"""The content of the last complete \boxed{...} or \fbox{...} of the response's end, braces balanced."""
    tail = response[-BOXED_TAIL_CHARS:]
    for found in reversed(list(_BOXED.finditer(tail))):
        depth = 1
        for position in range(found.end(), len(tail)):
            depth += {"{": 1, "}": -1}.get(tail[position], 0)
            if depth == 0:
                return tail[found.end() : position].strip()
    return None


def boxed_or_tail(response: str) -> str | None:
    r"""The boxed expression as \boxed{...}, or the end of the response, in which math-verify then searches."""
    found = boxed(response)
    if found is None:
        return plain_signs(_tail(response, TAIL_CHARS)).strip() or None
    return f"\\boxed{{{bare(latex_signs(found))}}}" if 0 < len(found) <= MAX_EXPRESSION_CHARS else None


def dapo_answer(response: str) -> str | None:
    r"""The line after the last "Answer:" of the response's end, or the last \boxed{...} there, normalised.

    Source: DAPO, arXiv:2503.14476, whose prompt asks for a last line of the form "Answer: $Answer".
    """
    tail = _tail(response, TAIL_CHARS).translate(_PLAIN)
    lines = (tail[found.end() :].partition("\n")[0] for found in reversed(list(_DAPO_ANSWER.finditer(tail))))
    line = next(filter(None, lines), None) or boxed(tail)
    return None if line is None else normalise(line) or None


_TURN_END = re.compile(r"<\|\w+\|>.*", re.DOTALL)
_MATHS = re.compile(r"([^$]*)\$([^$]+)\$([^$]*)")
_MEANS = re.compile(r"[0-9<>√≤≥≠±/]|\b(?:not|minus|negative|or)\b")
"""What in the text around $...$ belongs to the answer."""
_TWO_NUMBERS = re.compile(r"[0-9],\s+[0-9]")
_THOUSANDS_APART = re.compile(r"(?<![0-9.])[0-9]{1,3}(?: [0-9]{3})+(?![0-9]| ?/| [0-9]{3}(?![0-9]))")
_LOOSE_SPACE = re.compile(r"(?<![0-9]) | (?![0-9])")
"""Every space but those between two numbers: 2 3/4 is not 23/4."""
_UNIT_POWER = re.compile(r"\^\{?[23]\}?")
_ARTICLE = re.compile(r"\ban?\s+")
_AND = re.compile(r",?\s*\\text\s*\{\s*and\s*\}")
_ORNAMENTS = re.compile(r"°|\^\s*\{?\\circ\}?|\\(?:left|right|displaystyle|!|l?dots)|\\[()\[\]]|\\?\$|[*`\"“”]")
_SPACES = re.compile(r"(?<!\\)\\(?:[,;: ]|q?quad(?![A-Za-z]))|\s")
_METRES = re.compile(r"\\(?:text|mathrm|mbox|rm)\s*\{\s*(?:m|th)\s*\}")
_NESTED = r"(?:[^{}]|\{[^{}]*\})*"
_TEXT = re.compile(rf"\\(?:text|textbf|mathrm|mbox|mathbf|rm)\s*\{{({_NESTED})\}}|\\overline\s*\{{([^{{}}0-9]*)\}}")
_SHORT_FORMS = (
    (re.compile(r"\\[dt]frac"), r"\\frac"),
    (re.compile(r"\\frac\s*([0-9a-zA-Z])"), r"\\frac{\1}"),
    (re.compile(r"\\frac\s*(\{[^{}]*\})\s*([0-9a-zA-Z])"), r"\\frac\1{\2}"),
    (re.compile(rf"\\frac\s*(\{{{_NESTED}\}})\s*([0-9a-zA-Z])"), r"\\frac\1{\2}"),
    (re.compile(r"\\sqrt\s*([0-9a-zA-Z])"), r"\\sqrt{\1}"),
)
_UNIT = (
    r"degrees?|dollars?|cents?|units?|square|cubic|"
    r"inch(?:es)?|feet|foot|hours?|minutes?|days?|meters?|miles?|[ck]m|mm|kg|gm|mph|pounds?|points?|ways|integers|"
    r"digits|meals|edges|students|children|tickets|multiples"
)
_UNITS = re.compile(rf"(?:(?<=[0-9}}])|(?<=\S)\s+)(?:(?:{_UNIT}|\\circ|\\%|%)(?:\s*\^\{{?[23]\}}?)?\s*)+$")
_NAMED_UNIT = re.compile(rf"(?<=[0-9}}])\s+(?:(?:{_UNIT})\s*)+$")


def normalise(answer: str) -> str:
    r"""The answer without parts that do not change its value: a box, text around $...$, ornaments, units, commas.

    Follows Lewkowycz et al. 2022 (Minerva), appendix D.1: answers are compared as text. The result is never longer than
    MAX_EXPRESSION_CHARS. docs/measured/scorers.md compares it with verl's.
    """
    text = plain_signs(_TURN_END.sub("", boxed(answer) or answer)).lstrip()[:MAX_EXPRESSION_CHARS].replace("\\$", "")
    text = text.rsplit("=", 1)[-1]
    if text.count("$") % 2 and not text.lstrip().startswith("$"):  # "$x = 34$" without what precedes "="
        text = f"${text}"
    if maths := _MATHS.fullmatch(text):
        before, sign, _ = maths[1].rstrip().rpartition("-") if maths[1].rstrip().endswith("-") else (maths[1], "", "")
        if not _MEANS.search(_UNIT_POWER.sub("", f"{before} {maths[3]}")):
            text = sign + maths[2]
    text = _METRES.sub("", _AND.sub(",", _ARTICLE.sub("", text)))
    text = _TEXT.sub(r" \1\2 ", text)
    for short, whole in _SHORT_FORMS:
        text = short.sub(whole, text)
    text = _SPACES.sub(" ", _ORNAMENTS.sub("", text)).rstrip(".,; ")
    text = _UNITS.sub("", text)
    is_list = _TWO_NUMBERS.search(text) is not None
    text = _LOOSE_SPACE.sub("", _together(text))
    number = None if is_list else to_number(text, whole=True)
    return (text if number is None else plain_number(number))[:MAX_EXPRESSION_CHARS]


def _together(text: str) -> str:
    """The text without the spaces between groups of three digits: 12 345 is 12345, and 2 345/1000 stays."""
    return _THOUSANDS_APART.sub(lambda found: found[0].replace(" ", ""), text)


def plain_number(number: Decimal) -> str:
    """The shortest decimal text of a number: 18 and 18.00 are both "18"; -0 is "0"."""
    text = format(number, "f")
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text
