"""Answers and rules: what is read off a response, by hand; every real reference is correct against itself."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.data.answers import (
    MAX_EXPRESSION_CHARS,
    boxed,
    dapo_answer,
    last_number,
    latex_signs,
    marked_number,
    normalise,
    stated,
)
from rollout.rewards.answer_rules import RULES


@pytest.mark.parametrize(
    ("response", "extracted"),
    [
        ("first 12, then -7.50 apples", "-7.5"),
        ("it costs $1,234.00!", "1234"),
        ("#### 12\nbut 13", "13"),
        ("no number", None),
        ("5" + " " * 300, None),
    ],
)
def test_the_last_number_counts(response, extracted):
    assert last_number(response) == extracted


@pytest.mark.parametrize(
    ("response", "extracted"),
    [
        # The sign: a dash before a number, not between two.
        ("it is \N{MINUS SIGN}7.", "-7"),
        ("it is \N{EN DASH}$7.", "-7"),
        ("it is\N{EM DASH}7.", "7"),
        ("pages 10-18", "18"),
        ("pages 10\N{EN DASH}18", "18"),
        ("20 \N{MINUS SIGN} 2 = 18", "18"),
        ("=-18", "-18"),
        ("\N{FULLWIDTH PLUS SIGN}\N{FULLWIDTH DIGIT THREE}", "3"),
        # The whole number, or nothing.
        ("7 cm^3", "7"),
        ("7 ft2", "7"),
        ("7 m\N{SUPERSCRIPT TWO}", "7"),
        (r"$7\text{ cm}^{2}$", "7"),
        ("x_1 + x^2 is 9, or 9 x_1", "9"),
        ("2.5e-1", "0.25"),
        ("6E2 metres", "600"),
        (".75", "0.75"),
        ("Rs.75", "75"),
        (r"1\,800", "1800"),
        ("1\N{NARROW NO-BREAK SPACE}800", "1800"),
        ("3/4", None),
        ("3 / 4 of it", None),
        ("2 1/2", None),
        ("2\N{VULGAR FRACTION ONE HALF}", None),
        (r"\frac{3}{4}", None),
        (r"2\sqrt{3}", None),
        ("1,23", None),
        ("1,00,000", None),
        ("1.800,50", None),
        ("1'800", None),
        ("1_800", None),
        ("3\u20444", None),
        ("3\u00f74", None),
        (r"18\/30", None),
        (r"\binom{5}{2}", None),
        (r"\sqrt[3]{27}", None),
        ("10 ** 5", None),
        ("2\u03c0", None),
        ("18 \u00b1 2", None),
        ("-$ 18", "-18"),
        ("2^{10}", None),
        ("2**10", None),
        ("1.8 \N{MULTIPLICATION SIGN} 10^3", None),
        ("1e999999999", None),
        ("version 1.2.3", None),
        ("at 7:30", None),
    ],
)
def test_a_number_is_what_was_written_or_nothing(response, extracted):
    assert RULES["gsm8k_flexible"].extract(response) == extracted


@pytest.mark.parametrize(
    ("response", "extracted"),
    [
        ("#### \N{MINUS SIGN}1,234.50", "-1234.5"),
        ("#### \N{NON-BREAKING HYPHEN}7", "-7"),
        ("#### \N{EM DASH}7", None),
        ("#### +7", "7"),
        ("#### +-7", None),
        ("#### .5", "0.5"),
        ("#### **$7**", "7"),
        (r"#### \$7", "7"),
        (r"#### $\boxed{-7}$", "-7"),
        ("#### (7)", "7"),
        ("#### 7 ####", "7"),
        ("#### 7\n2. The next", "7"),
        ("#### 7 eggs - 2 broken", "7"),
        ("#### 7 - 2", None),
        ("#### 7-2", None),
        ("#### 7\N{EN DASH}9", None),
        ("#### 7 * 2", None),
        (r"#### 7 \times 2", None),
        ("#### 7 or 8", None),
        ("#### 7 1/2", None),
        ("#### 7\N{VULGAR FRACTION ONE HALF}", None),
        ("#### 7:30", None),
        ("#### 1 800", None),
        ("#### 1{,}800", "1800"),
    ],
)
def test_the_mark_is_followed_by_one_number(response, extracted):
    assert RULES["gsm8k"].extract(response) == extracted


@pytest.mark.parametrize("rule", ["gsm8k", "gsm8k_flexible", "math", "math_dapo"])
def test_every_dash_that_people_write_for_a_minus_is_one(rule):
    for minus in "\u002d\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d":
        response = {"gsm8k": f"#### {minus}41", "math": rf"\boxed{{{minus}41}}", "math_dapo": f"Answer: {minus}41"}
        text = response.get(rule, f"that is {minus}41.")
        assert RULES[rule].judge(text, "-41"), minus
        assert not RULES[rule].judge(text, "41"), minus
        assert RULES[rule].judge(text.replace(minus, "-"), f"{minus}41"), minus


@pytest.mark.parametrize(
    ("response", "prompt", "text"),
    [
        ("5", "", "5"),
        ("<think>5</think>6", "", "6"),
        ("<think>5</think>6<think>7</think>8", "", "8"),
        ("<think>5", "", None),
        ("<think>5</think>6 <think>7", "", None),
        ("5</think>6", "User: 3 + 3?<think>\n", "6"),
        ("5", "User: 3 + 3?<think>\n", None),
        ("5", "User: 3 + 3?<think>\n\n</think>\n\n", "5"),  # thinking is turned off
        ("5", "Think between <think> and </think>. Assistant:", "5"),
        ("5", "Begin with <think>. Assistant:", "5"),
        ("[THINK]5[/THINK]6", "", "6"),
        ("5", "[THINK]", None),
        ("<Thought>5</Thought>6", "", "6"),
        ("<reasoning>5", "", None),
        ("<|begin_of_thought|>5<|end_of_thought|>6", "", "6"),
        ("\u25c1think\u25b75\u25c1/think\u25b76", "", "6"),
        ("<seed:think>5</seed:think>6", "", "6"),
    ],
)
def test_what_stands_in_thoughts_is_not_stated(response, prompt, text):
    assert stated(response, prompt) == text


@pytest.mark.parametrize(
    ("rule", "form"),
    [("gsm8k", "#### {}"), ("gsm8k_flexible", "it is {}."), ("math", r"\boxed{{{}}}"), ("math", "It is ${}$."),
     ("math_dapo", "Answer: {}"), ("math_dapo", r"\boxed{{{}}}")],
)  # fmt: skip
def test_no_rule_reads_an_answer_in_thoughts(rule, form):
    judge = RULES[rule].judge
    thought = f"<think>Perhaps {form.format(41)}"
    assert not judge(f"{thought}. Wait", "41")
    assert not judge(f"{thought}</think>I am not sure.", "41")
    assert not judge(f"{thought}</think>{form.format(42)}", "41")
    assert judge(f"{thought}</think>{form.format(42)}", "42")
    assert not judge(form.format(41), "41", "3?<think>\n")
    assert judge(f"so</think>{form.format(41)}", "41", "3?<think>\n")


def test_an_exact_match_is_that_of_the_whole_response():
    assert RULES["exact_match"].judge("<think>hm", "<think>hm", "<think>\n")
    assert not RULES["exact_match"].judge("<think>hm</think>41", "41")


def test_strict_and_flexible_differ_where_the_mark_is_missing():
    assert RULES["gsm8k_flexible"].judge("so she has 18", "#### 18")
    assert not RULES["gsm8k"].judge("so she has 18", "#### 18")
    assert RULES["gsm8k"].extract("#### $1,800.00") == "1800"
    assert RULES["gsm8k"].judge("#### $1,800.00", "1800")
    assert marked_number("#### -0.0") == "0"


@pytest.mark.parametrize(
    ("response", "extracted"),
    [
        (r"\boxed{7}", "7"),
        (r"\boxed{1} or rather \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{7} and \boxed{never closed", "7"),
        (r"\fbox {x}", "x"),
        (r"\boxed{}", ""),
        ("boxed{7}", None),
        (r"\boxed{7}" + " " * 2000, None),
    ],
)
def test_the_last_complete_box_counts(response, extracted):
    assert boxed(response) == extracted


@pytest.mark.parametrize(
    ("response", "answer", "correct"),
    [
        ("Answer: 34", "34", True),
        ("**Answer:** $34$", "34", True),
        ("Answer: 33\nno\nAnswer: 34", "34", True),
        (r"Answer: $\boxed{34}$", "34", True),
        (r"thus \boxed{34}", "34", True),
        ("Answer: x = 34.", "34", True),
        (r"Answer: \dfrac{1}{2}", r"\frac12", True),
        (r"Answer: 1{,}000 \text{ dollars}", "1000", True),
        (r"Answer: 1,000 \text{ dollars}", "1000", True),
        (r"Answer: 90^\circ", "90", True),
        (r"Answer: 90^\circ", "90°", True),
        ("Answer: -34", "34", False),
        ("the answer is 34", "34", False),
        ("Answer:", "34", False),
        ("34", "34", False),
        ("Answer: 34" + " " * 300, "34", False),
        ("Answer: __import__('os').system('true')", "34", False),
    ],
)
def test_dapo_reads_the_line_that_its_prompt_asks_for(response, answer, correct):
    assert RULES["math_dapo"].judge(response, answer) is correct


@pytest.mark.parametrize(
    ("response", "answer", "correct"),
    [
        ("Answer:\n\n  7", "7", True),
        ("Answer:\n\\[\n7\n\\]", "7", True),
        ("**Answer**:\n**7**", "7", True),
        (r"\textbf{Answer:} 7", "7", True),
        ("Answer: 7\nAnswer:\n", "7", True),
        ("Answer: `x = 7`", "7", True),
        ("Answer: There are $7$ of them.", "7", True),
        ("Answer: There are $7$, not $8$.", "7", False),
        ("Answer: 8 or $7$", "7", False),
        ("Answer: $x = 7$ metres", "7", True),
        ("Answer: $7$ cm^2", "7", True),
        ("Answer: '7'", "7", False),
        (r"Answer: 12{,}345{,}678", "12345678", True),
        (r"Answer: 12\,345", "12,345", True),
        (r"Answer: 5\sqrt7", r"5\sqrt{7}", True),
        (r"Answer: \frac{\frac34}5", r"\frac{\frac{3}{4}}{5}", True),
        (r"Answer: \dfrac3{75}", r"\frac{3}{75}", True),
        (r"Answer: 9\pi \text{ square feet}", r"9\pi", True),
        (r"Answer: \mbox{7 tickets}", "7", True),
        (r"Answer: 7\mathrm{th}", "7", True),
        (r"Answer: x^\circ", "x", True),
        ("Answer: 3, 4", "34", False),
        (r"Answer: 0.7", r"0.\overline{7}", False),
        (r"Answer: \overline{PQ}", "PQ", True),
        (r"Answer: 3 \text{ and } 4", "3,4", True),
        (r"Answer: \begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", True),
        ("Answer: 7<|im_end|>\n<|im_start|>user", "7", True),
        ("Answer: 7", r"$\boxed{7}$", True),
    ],
)
def test_dapo_reads_what_its_published_scorer_reads_and_no_guesses(response, answer, correct):
    """docs/measured/scorers.md compares the two, form by form."""
    assert RULES["math_dapo"].judge(response, answer) is correct


@pytest.mark.parametrize(
    ("response", "answer", "correct"),
    [
        (r"\boxed{\frac{1}{2}}", "0.5", True),
        (r"\boxed{12}", "12.0", True),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", True),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", True),
        (r"\boxed{(1, 2)}", "(2, 1)", False),
        (r"so the answer is $\frac{3}{4}$", r"\frac{3}{4}", True),
        (r"\boxed{7}", "8", False),
        ("I do not know", "8", False),
        ("", "8", False),
        (r"\boxed{" + "1+" * MAX_EXPRESSION_CHARS + "1}", "801", False),
        (r"\boxed{\textbf{(B)}\ 12}", "B", True),
        (r"\boxed{\textbf{(B)}\ 12}", "A", False),
        (r"\boxed{\textbf{(B)}\ 12}", r"\text{(B)}", True),
        (r"\boxed{(B)\ 12}", "B", True),
        (r"\boxed{B. 12}", "(B)", True),
        (r"\boxed{B. 12}", "C", False),
        (r"\boxed{\text{I}}", "I", True),
        (r"\boxed{\text{J}}", "I", False),
        (r"\boxed{A, C}", "A", False),
    ],
)
def test_math_compares_values_not_texts(response, answer, correct):
    assert RULES["math"].judge(response, answer) is correct


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("2½", "2.5"),
        ("-2 ¾", r"-\frac{11}{4}"),
        ("2 1/2", r"2\frac{1}{2}"),
        ("⅓", "1/3"),
        ("10⁻³", "0.001"),
        ("x² + 1", "1 + x^2"),
        ("√2/2", r"\frac{\sqrt2}{2}"),
        ("3√(x+1)", r"3\sqrt{1+x}"),
        ("∛5", r"\sqrt[3]{5}"),
        ("(-∞, 2] \u222a {3}", r"(-\infty, 2] \cup \{3\}"),
        ("90°", "90"),
        ("25 °C", r"25^\circ\text{C}"),
        ("3·4", "12"),
        ("50%", r"50\%"),
        ("7\uff05", r"7\%"),
        ("True", "true"),
        (r"0.\overline{3}", "1/3"),
        (r"-1.2\overline{36}", "-68/55"),
        (r"0.\bar{6}", "2/3"),
        ("1e-05", "0.00001"),
        ("1.5E+3", "1500"),
        (r"50\%", "50"),
        ("12.5%", "12.5"),
        (r"33\frac{1}{3}\%", r"\frac{100}{3}"),
        (r"50\%", "0.5"),
        (r"1.2\%", "0.012"),
        ("€5", "5"),
        (r"5\text{ cm²}", r"5\text{ cm}^2"),
        ("1 000", "1000"),
        ("-12 345 678.5", "-12345678.5"),
        ("2 345/1000", "2.345"),
        ("5 dollars", "5"),
        (r"\$1 500 dollars", "1500"),
        (r"\frac{7}{2} hours", "3.5"),
        (r"45\degree", "45"),
        (r"\varnothing", r"\emptyset"),
    ],
)
def test_signs_of_unicode_and_latex_are_one_answer_for_math_on_either_side(one, other):
    rule = RULES["math"]
    for response, reference in ((one, other), (other, one), (one, one)):
        assert rule.judge(f"So \\boxed{{{response}}}.", reference), (response, reference)
    for wrong in ("2", "1", "3/2", "(1, 2)", "3"):
        assert not rule.judge(f"So \\boxed{{{wrong}}}.", one), wrong


@given(text=st.text(max_size=600))
def test_no_text_breaks_an_extraction_and_none_grows(text):
    assert latex_signs(latex_signs(text)) == latex_signs(text)
    for extract in (last_number, marked_number, boxed, dapo_answer):
        found = extract(text)
        assert found is None or len(found) <= max(len(text), 1)
    assert normalise(normalise(text)) == normalise(text) or "=" in text or "\\" in text or len(text) > 100


@given(number=st.integers(-(10**9), 10**9))
def test_every_number_is_its_own_answer(number):
    for name, response in (
        ("gsm8k", f"#### {number:,}"),
        ("gsm8k_flexible", f"= {number:,}"),
        ("math_dapo", f"Answer: {number:,}"),
        ("exact_match", f" {number}\n"),
    ):
        rule = RULES[name]
        assert rule.judge(response, str(number))
        assert not rule.judge(response, str(number + 1))


@pytest.mark.skipif("PARITY_TEST_DATA" not in os.environ, reason="PARITY_TEST_DATA is not set")
@pytest.mark.parametrize(
    ("file", "key", "count"),
    [
        ("aime24/test.jsonl", "answer", 30),
        ("amc23/test.jsonl", "answer", 40),
        ("svamp/test.jsonl", "Answer", 1000),
        ("mawps/addsub.jsonl", "target", 395),
        ("mawps/multiarith.jsonl", "target", 600),
        ("mawps/singleeq.jsonl", "target", 508),
        ("mawps/singleop.jsonl", "target", 562),
    ],
)
def test_real_references_are_correct_against_themselves(file, key, count):
    lines = (Path(os.environ["PARITY_TEST_DATA"]) / file).read_text(encoding="utf-8").splitlines()
    answers = [str(json.loads(line)[key]) for line in lines]
    assert len(answers) == count
    for answer in answers:
        whole = answer.removesuffix(".0")
        assert RULES["gsm8k"].judge(f"#### {whole}", answer)
        assert RULES["gsm8k_flexible"].judge(f"it is {whole}", answer)
        assert RULES["math_dapo"].judge(f"Answer: {whole}", answer)
    for answer in answers[:50]:
        whole = answer.removesuffix(".0")
        assert RULES["math"].judge(rf"\boxed{{{whole}}}", answer)
        assert not RULES["math"].judge(rf"\boxed{{{whole}1}}", answer)


@pytest.mark.parametrize(
    "written",
    [
        r"18\frac{1}{2}", "18 \u00bd", "18 and 1/2", r"18\sqrt{3}", "18\u221a3", r"18\pi", "18\u03c0", "18x10^5",
        "18 x 2", "18\u00b710^5", "18\u22c52", "18\u20442", "18\u22362", "18'800", "18\u2019800",
        "18_800", "18\uff0c800",
        "18 \u00b1 2", "18~20", "18 to 20", "18, 20", "18 and 20", "18\u207f", "18\u02c62",
    ],
)  # fmt: skip
def test_a_part_of_a_number_is_no_answer_of_gsm8k(written):
    assert RULES["gsm8k"].extract(f"so #### {written}") is None


@pytest.mark.parametrize(
    "after", ["/week", " dollars", ".", ", so it ends", "\n\nQuestion 2", " cm", " m^2", " x", "%", " to go", "~"]
)
def test_what_follows_a_number_may_be_anything_else(after):
    assert RULES["gsm8k"].extract(f"so #### 18{after}") == "18"


@pytest.mark.parametrize(
    ("written", "extracted"),
    [
        ("-$6$", "-6"), ("\u2212$6$", "-6"), (r"-$\frac{1}{2}$", r"-\frac{1}{2}"), (">$6$", ">6"),
        ("The number is $34$.", "34"),
        ("2 3/4", "2 3/4"), ("5 6", "5 6"), ("1 234", "1234"), ("100, 200", "100,200"), ("(1, 2)", "(1,2)"),
    ],
)  # fmt: skip
def test_signs_and_spaces_that_make_another_answer_stay(written, extracted):
    assert RULES["math_dapo"].extract(f"Answer: {written}") == extracted


@pytest.mark.parametrize("rule", ["gsm8k_flexible", "math"])
@pytest.mark.parametrize("cut", ["1234", "-34", "1,034", "0.34"])
def test_the_part_of_a_response_that_is_read_begins_with_no_part_of_a_number(rule, cut):
    assert not RULES[rule].judge(f"It is {cut} {'z' * 297}", "34")


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ("assistant\n<think>\nOkay, let me", True),
        ("<|Assistant|><think>\nFirst", True),
        ("Think in <think> tags.\nassistant\n", False),
        ("Write\n<think>\n...\n</think>\nand the answer.\nassistant\n", False),
        ("assistant\n<think>\nDone.\n</think>\n", False),
    ],
)
def test_a_prompt_that_goes_on_may_have_opened_a_thought(prompt, is_open):
    assert (RULES["math"].extract(r" add: maybe \boxed{5}? or", prompt) is None) is is_open
