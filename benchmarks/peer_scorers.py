"""reward.function=math_dapo beside verl 0.9.1's scorer for DAPO: forms of an answer, both verdicts, the reason if they
differ. A markdown table, on a CPU, in seconds.

The environment is that of peer_agreement.py, whose docstring says how to make it. The exit status is 1 if the verdicts
differ without a reason in the table, or if a reason stands where they agree.
"""

from __future__ import annotations

import argparse
import sys
from typing import NamedTuple

from rollout.rewards import RULES

ORNAMENT = "ornaments of Markdown and LaTeX are no part of an answer"
DISPLAY = "the answer stands in the display that the next line opens"
NUMBER = "numbers are compared by value"
CHARACTER = "signs and digits of Unicode are what they stand for"
FRACTION = "`\\dfrac`, `\\tfrac` and short forms are `\\frac{}{}`"
UNIT = "a unit that verl's list has not, or not in this form"
SEVERAL = "several answers are not one: reading the first of them would pay for guessing"
LIST = "verl removes all commas between digits, so that the pair 1, 2 is the number 12"
APART = "verl removes all spaces, so that 2 3/4 is 23/4"
SIGN = "verl drops the sign in front of the formula"
REPEATING = "verl drops the line over repeating digits, so that 0.3 is 1/3"
TURN = "verl's reward manager cuts this token off before it calls the scorer"


class Form(NamedTuple):
    """A response with a reference, and the reason why the two scorers differ; "" where they agree."""

    response: str
    answer: str
    reason: str = ""


FORMS = (
    Form("Answer: 34", "34"),
    Form("Answer: 33", "34"),
    Form("ANSWER : 34", "34"),
    Form("Final answer: 34", "34"),
    Form("The answer is 34", "34"),
    Form("Answer: 12\nNo. Answer: 34", "34"),
    Form("Answer: 34\nQuestion 2\nAnswer: 12", "34"),
    Form("Answer:\n34", "34"),
    Form("Answer:\n\n34", "34"),
    Form("Answer:", "34"),
    Form("Answer: 34\nAnswer:", "34"),
    Form("Answer:\nAnswer: 34", "34", "verl reads `Answer: 34` after the first mark"),
    Form("Answer:\n\\[\n34\n\\]", "34", DISPLAY),
    Form("Answer:\n$$\n34\n$$", "34", DISPLAY),
    Form("**Answer:** 34", "34", ORNAMENT),
    Form("**Answer**: 34", "34", ORNAMENT),
    Form("**Answer: 34**", "34", ORNAMENT),
    Form("\\textbf{Answer:} 34", "34", ORNAMENT),
    Form("Answer: `34`", "34", ORNAMENT),
    Form("Answer: `$34$`", "34"),
    Form("Answer: \\(34\\)", "34", ORNAMENT),
    Form("Answer: $34$", "34"),
    Form("Answer: $34$.", "34"),
    Form("Answer: 34.", "34", ORNAMENT),
    Form("Answer: The number is $34$.", "34"),
    Form("Answer: $34$ apples", "34"),
    Form("Answer: 34 apples", "34"),
    Form("Answer: $x = 34$ apples", "34", "verl cuts at `=` first, and then sees no pair of `$`"),
    Form("Answer: x = 34", "34"),
    Form("Answer: 34", "x = 34"),
    Form("Answer: 35 = 34", "34"),
    Form("Answer: $34$ or $35$", "34", SEVERAL),
    Form("Answer: 5 or $34$", "34", SEVERAL),
    Form("Answer: 34 or 35", "34"),
    Form("Answer: \\boxed{34}", "34"),
    Form("Answer: $\\boxed{34}$", "34"),
    Form("so \\boxed{34}", "34"),
    Form("so \\boxed{1{,}234}", "1234", "without `Answer:` the last box counts; verl compares it as it stands"),
    Form("Answer: 34", "\\boxed{34}"),
    Form("Answer: 34", "$34$"),
    Form("Answer: 34", "The sum is \\boxed{34}.", "the box of a reference is its answer, wherever it stands"),
    Form('Answer: "34"', "34"),
    Form("Answer: 1,234", "1234"),
    Form("Answer: 1{,}234", "1234"),
    Form("Answer: 1 234", "1234"),
    Form("Answer: 1\\,234", "1234", NUMBER),
    Form("Answer: 1,2", "1, 2"),
    Form("Answer: 2 3/4", "23/4", APART),
    Form("Answer: 5 6", "56", APART),
    Form("Answer: 100, 200", "100200", LIST),
    Form("Answer: -$6$", "-6", SIGN),
    Form("Answer: -$6$", "6", SIGN),
    Form("Answer: 1, 2", "12", LIST),
    Form("Answer: 12", "1,2", LIST),
    Form("Answer: 1 \\text{ and } 2", "1,2"),
    Form("Answer: 34.0", "34", NUMBER),
    Form("Answer: 0.50", "0.5", NUMBER),
    Form("Answer: 034", "34", NUMBER),
    Form("Answer: +34", "34", NUMBER),
    Form("Answer: -34", "-34"),
    Form("Answer: -34", "34"),
    Form("Answer: \N{MINUS SIGN}34", "-34", CHARACTER),
    Form("Answer: \N{FULLWIDTH DIGIT THREE}\N{FULLWIDTH DIGIT FOUR}", "34", CHARACTER),
    Form("Answer\N{FULLWIDTH COLON}34", "34", CHARACTER),
    Form("Answer: \\sqrt2", "\\sqrt{2}"),
    Form("Answer: 2\\sqrt3", "2\\sqrt{3}"),
    Form("Answer: \\sqrt{12}", "2\\sqrt{3}"),
    Form("Answer: \\frac12", "\\frac{1}{2}"),
    Form("Answer: \\dfrac{1}{2}", "\\frac{1}{2}", FRACTION),
    Form("Answer: \\frac1{72}", "\\frac{1}{72}", FRACTION),
    Form("Answer: \\frac{1}2", "\\frac{1}{2}", FRACTION),
    Form("Answer: 1/2", "\\frac{1}{2}"),
    Form("Answer: 0.5", "\\frac{1}{2}"),
    Form("Answer: 0.\\overline{3}", "0.\\overline{3}"),
    Form("Answer: 0.3", "0.\\overline{3}", REPEATING),
    Form("Answer: \\overline{AB}", "AB"),
    Form("Answer: \\text{even}", "even"),
    Form("Answer: an ellipse", "ellipse"),
    Form("Answer: (A)", "A"),
    Form("Answer: \\left(1, 2\\right)", "(1,2)", ORNAMENT),
    Form("Answer: 34^\\circ", "34"),
    Form("Answer: 34 \\text{ cm}", "34"),
    Form("Answer: 34 \\text{ cm}^2", "34"),
    Form("Answer: 34 \\text{m}", "34"),
    Form("Answer: 9\\pi \\text{ square inches}", "9\\pi"),
    Form("Answer: 34 students", "34"),
    Form("Answer: 34 ways", "34"),
    Form("Answer: 34 mph", "34"),
    Form("Answer: 34 pounds", "34"),
    Form("Answer: 34 digits", "34"),
    Form("Answer: \\$34", "34"),
    Form("Answer: 34 cm^2", "34", UNIT),
    Form("Answer: 34 miles", "34", UNIT),
    Form("Answer: 34\\%", "34", UNIT),
    Form("Answer: 34 days", "34", UNIT),
    Form("Answer: 34<|im_end|>", "34", TURN),
    Form("<think>Answer: 34</think>Answer: 35", "34"),
    Form("<think>Answer: 34", "34", "a response that ends inside of its thoughts states no answer"),
)


def code(text: str) -> str:
    """`text` as code in a cell of a table; a line's end is shown as an arrow."""
    return (
        (f"`` {text} ``" if "`" in text else f"`{text}`")
        .replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}")
        .replace("|", "\\|")
    )


def main() -> int:
    """Print the table."""
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0]).parse_args()
    try:
        from verl.utils.reward_score.math_dapo import compute_score
    except ImportError as error:
        sys.exit(
            f"verl is not installed: {error}. The docstring of peer_agreement.py says how to make the environment."
        )
    lines = ["| response | reference | verl | Parity | |", "| --- | --- | --- | --- | --- |"]
    broken: list[str] = []
    for form in FORMS:
        theirs = bool(compute_score(form.response, form.answer)["acc"])
        ours = RULES["math_dapo"].judge(form.response, form.answer)
        verdicts = " | ".join("right" if verdict else "wrong" for verdict in (theirs, ours))
        lines.append(f"| {code(form.response)} | {code(form.answer)} | {verdicts} | {form.reason} |")
        if (theirs != ours) != bool(form.reason):
            broken.append(form.response)
    sys.stdout.write("\n".join(lines) + "\n")
    if broken:
        sys.stderr.write(f"no longer as the table says: {broken}\n")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
