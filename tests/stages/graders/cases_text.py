"""Cases of the graders that compare text: (response, label or what stands for it, score, why).

The tables named GOLDEN_* are what the dialects are defined by.
"""

from __future__ import annotations

from typing import Any

GOLDEN_DEEPSCALER: list[tuple[str, object, int, str]] = [
    (r"\boxed{5}", "5", 0, "right, but without a marker"),
    (r"</think>\boxed{5}", "5", 1, "after the closing tag"),
    (r"<think>\boxed{4}</think>\boxed{5}", "5", 1, "the box after the reasoning"),
    (r"<think>\boxed{5}</think> done", "5", 0, "the box is in the reasoning"),
    (r"</think>\boxed{5}", r"\boxed{5}", 1, "a boxed label"),
    (r"### x ###Response: \boxed{5}", "5", 1, "the other marker"),
    ("</think>5", "5", 0, "no box"),
    (r"a</think>b</think>\boxed{5}", "5", 1, "the last closing tag counts"),
    ("", "5", 0, "an empty response"),
]
DEEPSCALER: list[tuple[str, object, int, str]] = [
    (r"</think>\boxed{\frac{1}{2}}", "0.5", 1, "judged as by math:compat"),
    (r"</think>\boxed{\frac{6}{8}}", r"\frac{3}{4}", 0, "which wants fractions reduced"),
    (r"</think>\fbox{5}", "5", 0, "and knows \\boxed only"),
    (r"<think>\boxed{5}", "5", 0, "a thought that was cut off"),
    (r"###Response \boxed{1} ###Response \boxed{2}", "1", 1, "the part between two marks"),
    (r"###Response \boxed{1}</think>\boxed{2}", "2", 1, "the end of the reasoning goes before the mark"),
]

GOLDEN_DAPO: list[tuple[str, object, int, str]] = [
    ("Answer: 34", "34", 1, "the plain case"),
    ("Answer: 34.0", "34", -1, "no arithmetic"),
    ("Answer: 17\nwait\nAnswer: 34", "34", 1, "the last line counts"),
    ("Answer: 34" + "x" * 400, "34", -1, "beyond the last 300 characters"),
    ("answer : $34$", "34", 1, "any case, a space, inline mathematics"),
    ("**Answer:** 34", "34", -1, "the stars become part of the answer"),
    (r"Answer: \boxed{34}", "34", 1, "a box is unwrapped"),
    ("Answer: 34.", "34", -1, "so does a full stop"),
    ("Answer: 1,200 dollars", "1200", 1, "a unit of the list, and a thousands comma"),
    ("Answer: 3/4", "3/4", 1, "a label that is no integer is compared as text"),
    ("Answer: 34 apples", "34", -1, "no unit of the list"),
    ("Answer: 34", "3/4", -1, "another text"),
    ("Answer: x = 34", "34.0", 1, "an equation, and an integral label"),
    ("The answer is 34", "34", -1, "no colon"),
]
DAPO: list[tuple[str, object, int, str]] = [
    ("Answer:\n\n34", "34", 1, "the answer on a line below"),
    ("ANSWER: 34\nbye", "34", 1, "up to the end of the line"),
    ("Answer: 34\nAnswer:", "34", 1, "a mark with nothing behind it is none"),
    ("Answer: Answer: 34", "34", -1, "the first mark takes the rest of its line"),
    ("Answer: an orange", "orange", 1, "an article is dropped"),
    (r"Answer: \text{cat}", "cat", 1, "text is unwrapped"),
    (r"Answer: \frac12", r"\frac{1}{2}", 1, "a short fraction gets its braces"),
    (r"Answer: \sqrt2", r"\sqrt{2}", 1, "a short root gets its braces"),
    ("Answer: 12 cm", "12", 1, "a unit of the list"),
    (r"Answer: 90^\circ", "90", 1, "degrees are dropped"),
    (r"Answer: 90^{\circ}", "90", 1, "and so with braces"),
    (r"Answer: 1{,}234", "1234", 1, "a comma in braces"),
    (r"Answer: $1,\!234$", "1234", 1, "a comma without its gap"),
    (r"Answer: 12\;345", "12345", 1, "a wide space"),
    (r"Answer: 7\mathrm{th}", "7", 1, "an ordinal"),
    ("Answer: 7", "7\\text{\ns}", 1, "a unit on a line of its own in a label"),
    (r"Answer: 5\text{m}^2", "5", 1, "a unit and its power"),
    (r"Answer: 1{.}234", "1234", -1, "no other mark in braces"),
    ("Answer: -5", "-5", 1, "a sign"),
    ("Answer: 5", "-5", -1, "without its sign"),
    ("Answer: 1,2", "12", 1, "commas in digits go, wherever they stand"),
    ("Answer: nan", "nan", 1, "nan is a text"),
    ("Answer: inf", "1e999999999", -1, "a label of monstrous size is a text"),
    ("Answer: 100000", "1e5", 1, "an integral label in another notation"),
    ("", "5", -1, "an empty response"),
    ("Answer:", "5", -1, "nothing behind the mark"),
]

GOLDEN_F1: list[tuple[str, str, float, str]] = [
    ("The cat sat", "cat sat", 1.0, "articles do not count"),
    ("cat", "dog", 0.0, "nothing in common"),
    ("yes", "no", 0.0, "closed answers"),
    ("Yes, it is", "yes", 0.0, "a closed answer is exact"),
    ("New York City", "new york", 0.8, "two of three words"),
    ("a b b c", "b b d", 2 / 3, "words count as often as they occur"),
    ("U.S.A.", "usa", 1.0, "punctuation is dropped"),
    ("42 km", "42", 2 / 3, "one word too many"),
    ("the", "the", 0.0, "nothing is left on either side"),
    ("red red", "red", 2 / 3, "a word too often"),
    ("caf\u00e9", "cafe", 0.0, "accents count"),
]
F1: list[tuple[str, str, float, str]] = [
    ("", "cat", 0.0, "an empty response"),
    ("cat", '["dog", "cat"]', 1.0, "any of several answers"),
    ("black cat", '["cat", "black dog"]', 2 / 3, "the best of several answers"),
    ("[cat]", "[cat]", 1.0, "a bracket is no list"),
    ("yes", "Yes!", 1.0, "closed answers agree"),
    ("cat  \n sat", "sat cat", 1.0, "the order does not matter"),
    ("noanswer", "no answer", 0.0, "a closed answer is one word"),
]
EXACT_MATCH: list[tuple[str, str, float, str]] = [
    ("The cat.", "cat", 1.0, "articles and punctuation"),
    ("cat sat", "sat cat", 0.0, "the order matters"),
    ("Paris", '["London", "paris"]', 1.0, "any of several answers"),
    ("Paris, France", "Paris", 0.0, "a word too many"),
    ("", "the", 0.0, "an answer without words is none"),
    ("42", "42.0", 0.0, "no arithmetic: the point is dropped"),
]

TEXT: dict[str, list[Any]] = {
    "deepscaler": [*GOLDEN_DEEPSCALER, *DEEPSCALER],
    "dapo": [*GOLDEN_DAPO, *DAPO],
    "f1": [*GOLDEN_F1, *F1],
    "exact_match": EXACT_MATCH,
}

CHOICES = ["red", "green", "blue", "grey"]
GOLDEN_GPQA: list[tuple[str, str, int, str]] = [
    ("The answer is C", "C", 1, "the plain case"),
    ("Answer: **(B)**", "B", 1, "decoration around the letter"),
    ("answer is definitely B", "B", 1, "the d of definitely is no letter"),
    ("I pick B because A is wrong", "B", 0, "the last capital that stands alone is A"),
    ("B is the correct one", "B", 1, "the letter comes first"),
    ("<think>answer is A</think>answer is B", "B", 1, "after the reasoning"),
    ("<think>answer is B", "B", 0, "a thought that was cut off"),
    ("answer is E", "B", 0, "no such choice"),
    ("the blue one", "C", 1, "the text of one choice"),
    ("blue or red", "C", 0, "the texts of two choices"),
    (r"\boxed{D}", "D", 1, "a letter in a box"),
    ("Final answer: a", "A", 0, "a small letter"),
    ("option A? no, the answer is D", "D", 1, "the last of two hits"),
]
GPQA: list[tuple[str, str, int, str]] = [
    (r"The answer is A. \boxed{B}", "B", 1, "a box goes before words"),
    (r"\boxed{\text{B}}", "B", 1, "a letter as text in a box"),
    (r"\boxed{(B)}", "B", 1, "a letter in brackets in a box"),
    (r"\boxed{\textbf{(C)}}", "C", 1, "a bold letter in a box"),
    (r"\boxed{B. green}", "B", 1, "the letter and its text, read as the last capital"),
    (r"\boxed{E} so the answer is B", "B", 1, "a box without a valid letter is passed over"),
    ("The final answer is: B. A was close, so is the option A", "B", 1, "the final answer goes before an option"),
    ("The correct option is D.", "D", 1, "a letter before a full stop"),
    ("My choice: C", "C", 1, "a choice"),
    ("Answer: $B$", "B", 1, "a letter in mathematics"),
    ("Answer: Because", "B", 0, "the first letter of a word"),
    ("(A) is wrong, (B) is wrong, so D", "D", 1, "the last capital"),
    ("A is correct? No: C is correct.", "C", 1, "the last of two"),
    ("It is Grey.", "D", 1, "a choice in any case"),
    ("reddish", "A", 0, "part of a word"),
    ("", "A", 0, "an empty response"),
    ("answer is A</think>", "A", 0, "nothing after the reasoning"),
    ("the answer is b", "B", 0, "a small letter"),
]

CAT_TWICE = {"keyword": "cat", "frequency": 2, "relation": "at least"}
E_THRICE = {"letter": "e", "let_frequency": 3, "let_relation": "at least"}
NO_E = {"letter": "e", "let_frequency": 1, "let_relation": "less than"}
SECOND = {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"}
THEN = {**SECOND, "first_word": "Then"}
FIRST_OF_3 = {"num_paragraphs": 3, "nth_paragraph": 1, "first_word": "a"}
SECTIONS = {"section_spliter": "SECTION", "num_sections": 2}


def capitals(number: int, relation: str) -> dict[str, object]:
    return {"capital_frequency": number, "capital_relation": relation}


# (instruction, arguments, response, holds, why)
GOLDEN_IFEVAL: list[tuple[str, dict[str, Any], str, int, str]] = [
    ("number_words", {"num_words": 5, "relation": "at least"}, "one two three four", 0, "four are not five"),
    ("number_words", {"num_words": 5, "relation": "less than"}, "one two three four", 1, "four are less than five"),
    ("no_comma", {}, "a,b", 0, "a comma"),
    ("number_paragraphs", {"num_paragraphs": 3}, "p1\n\n***\n\np2\n***\np3", 1, "dividers separate"),
    ("english_capital", {}, "HELLO World", 0, "small letters"),
    ("english_capital", {}, "HELLO 42!", 1, "digits have no case"),
    ("number_bullet_lists", {"num_bullets": 2}, "* a\n- b\n+ c", 1, "a plus is no bullet"),
    ("number_placeholders", {"num_placeholders": 2}, "Dear [name], at [place]", 1, "two in brackets"),
    ("keywords:frequency", CAT_TWICE, "Cat cats cat", 1, "in any case"),
    ("json_format", {}, '{"a":1} done', 0, "more than JSON"),
]
IFEVAL: list[tuple[str, dict[str, Any], str, int, str]] = [
    ("length_constraints:number_words", {"num_words": 2, "relation": "at least"}, "it's", 1, "an apostrophe separates"),
    ("number_words", {"num_words": 5.0, "relation": "less than"}, "a b c d e", 0, "five are not less than five"),
    ("punctuation:no_comma", {}, "a; b", 1, "a semicolon"),
    ("number_paragraphs", {"num_paragraphs": 2}, "a\n\nb", 0, "blank lines do not separate"),
    ("number_paragraphs", {"num_paragraphs": 2}, "a\n\nb\n***\nc", 1, "dividers alone do"),
    ("number_paragraphs", {"num_paragraphs": 2}, "a *** b", 1, "also within a line"),
    ("number_paragraphs", {"num_paragraphs": 2}, "***\na\n***\nb\n***", 1, "and around the whole"),
    ("number_paragraphs", {"num_paragraphs": 2}, "a\n***\n***\nb", 0, "but not with nothing in between"),
    ("english_capital", {}, "DIES IST EIN DEUTSCHER SATZ UND NICHTS ANDERES", 0, "capitals, but not in English"),
    ("english_capital", {}, "THIS IS PLAINLY A SENTENCE IN ENGLISH", 1, "capitals in English"),
    ("english_lowercase", {}, "dies ist ein deutscher satz und nichts anderes", 0, "small letters, but not in English"),
    ("response_language", {"language": "de"}, "Dies ist ein deutscher Satz und nichts anderes.", 1, "German"),
    ("response_language", {"language": "fr"}, "Dies ist ein deutscher Satz und nichts anderes.", 0, "is not French"),
    ("response_language", {"language": "fr"}, "1 + 1 = 2", 1, "a text without words is in any language"),
    ("english_lowercase", {}, "all small 1", 1, "no capitals"),
    ("english_lowercase", {}, "One", 0, "a capital"),
    ("english_lowercase", {}, "123", 0, "no letters at all"),
    ("number_bullet_lists", {"num_bullets": 1}, "**bold**\n  - b", 1, "bold text is no bullet"),
    ("number_bullet_lists", {"num_bullets": 1}, "- a\n- b", 0, "exactly as many"),
    ("number_placeholders", {"num_placeholders": 1}, "[open\n]", 0, "a placeholder is on one line"),
    ("keywords:frequency", {"keyword": "cat", "frequency": 1, "relation": "less than"}, "cats", 0, "part of a word"),
    ("keywords:existence", {"keywords": ["cat", "dog"]}, "A CAT and dogs", 1, "all occur, in any case"),
    ("keywords:existence", {"keywords": ["cat", "dog"]}, "a cat", 0, "one is missing"),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "cats", 1, "part of another word is allowed"),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "a Cat!", 0, "the word itself is not"),
    ("keywords:letter_frequency", E_THRICE, "Every eel", 1, "any case"),
    ("keywords:letter_frequency", NO_E, "e", 0, "one is not less"),
    ("number_sentences", {"num_sentences": 2, "relation": "at least"}, "One. Two!", 1, "two ends"),
    ("number_sentences", {"num_sentences": 2, "relation": "less than"}, "Dr. Smith paid 3.50 at noon", 1, "no end"),
    ("number_sentences", {"num_sentences": 3, "relation": "at least"}, "Really?! Yes. Fine", 1, "the last has no end"),
    ("nth_paragraph_first_word", THEN, "First.\n\n'\"Then, more", 1, "quotes before it, marks behind it"),
    ("nth_paragraph_first_word", SECOND, "then\n\nlast", 0, "another paragraph"),
    ("nth_paragraph_first_word", FIRST_OF_3, "a\n\nb", 0, "too few paragraphs"),
    ("postscript", {"postscript_marker": "P.S."}, "Bye.\np. s. more", 1, "with spaces and in small letters"),
    ("nth_paragraph_first_word", SECOND, "First.\n\n*then* more", 0, "stars are part of it"),
    ("postscript", {"postscript_marker": "P.P.S"}, "P.S. only", 0, "another mark"),
    ("postscript", {"postscript_marker": "P.P.S"}, "P. p. s: more", 1, "without the last full stop"),
    ("constrained_response", {}, "Well: My answer is maybe.", 1, "one of the three"),
    ("constrained_response", {}, "Well: my answer is maybe.", 0, "with its capital"),
    ("constrained_response", {}, "yes.", 0, "none of the three"),
    ("number_highlighted_sections", {"num_highlights": 2}, "*a* and **b**", 1, "both kinds count"),
    ("number_highlighted_sections", {"num_highlights": 1}, "** ** * *", 0, "nothing inside"),
    ("multiple_sections", SECTIONS, "SECTION 1\na\nSECTION 2", 1, "two sections"),
    ("multiple_sections", SECTIONS, "SECTION one\nSECTION 2", 0, "a number"),
    ("json_format", {}, '```json\n{"a": [1]}\n```', 1, "in a fence"),
    ("json_format", {}, "``````", 0, "nothing in the fence"),
    ("json_format", {}, "```", 0, "one fence"),
    ("json_format", {}, '```{"a": 1}``` done', 0, "something behind the fence"),
    ("json_format", {}, "[" * 100_000, 0, "too deep for the parser"),
    ("title", {}, "<<My Title>>\ntext", 1, "a title"),
    ("title", {}, "<< >>", 0, "an empty title"),
    ("title", {}, "<<a < b>>", 1, "a title with an angle bracket"),
    ("title", {}, "<<a\nb>>", 0, "a title on two lines"),
    ("number_sentences", {"num_sentences": 2, "relation": "at least"}, "We met at 5 p.m. Then we left.", 1, "an end"),
    ("number_sentences", {"num_sentences": 2, "relation": "less than"}, "It was 5 p.m. and dark.", 1, "and no end"),
    ("two_responses", {}, "a\n******\nb", 1, "two responses"),
    ("two_responses", {}, "a\n******\na", 0, "twice the same"),
    ("two_responses", {}, "a******b******c", 0, "three responses"),
    ("repeat_prompt", {"prompt_to_repeat": "Write a poem."}, "write a poem. Roses", 1, "the prompt comes first"),
    ("repeat_prompt", {"prompt_to_repeat": "Write a poem."}, "Sure! Write a poem.", 0, "something comes before"),
    ("end_checker", {"end_phrase": "Any questions?"}, 'Done. any questions?" ', 1, "quotes at the end are dropped"),
    ("end_checker", {"end_phrase": "Any questions?"}, "Any questions? No.", 0, "something follows"),
    ("quotation", {}, ' "all of it" ', 1, "quotes around everything"),
    ("quotation", {}, '"', 0, "one quote is no pair"),
    ("capital_word_frequency", capitals(2, "at least"), "NASA and ESA", 1, "words in capitals"),
    ("capital_word_frequency", capitals(1, "less than"), "Nasa 42", 1, "neither a capital alone nor a number"),
    ("capital_word_frequency", capitals(2, "less than"), "A TO-DO", 0, "a word with a hyphen is one, a letter is one"),
    ("no_comma", {"num_words": None}, "<think>a, b</think>c", 1, "the reasoning does not count; nulls are nothing"),
    ("no_comma", {}, " \n ", 0, "an empty response follows nothing"),
]
