# %% [markdown]
# # 0. Two identical requests, zero tokens reused
#
# Here is a prompt: a page of house rules for an assistant in a museum, and a question.
# It is [493](#together) tokens long. Two visitors send it at the same moment, to an engine whose prefix
# cache is switched on. The engine has never seen it before.
#
# A *prefix cache* keeps what the model computed for the beginning of a prompt (its keys and
# values, chapter 1), in *pages* of 16 tokens, for the next prompt that begins alike.
#
# The rules are the same, the question is the same, every token is the same. How many tokens
# of the second prompt does the cache save?

# %%
from minivllm import LLM, SamplingParams
from minivllm.events import EventLog

ROOMS = """maps and globes, clocks, telescopes, old letters, coins,
ships in bottles, typewriters, radios, early computers, tin toys,
musical boxes, cameras, bicycles, paper kites, lighthouse lamps,
pressed flowers, puppets, keys and locks, model trains"""
NUMBERS = """one two three four five six seven eight nine ten eleven twelve
thirteen fourteen fifteen sixteen seventeen eighteen nineteen"""

rules = """You answer the visitors of a small museum, briefly and politely.
Tickets are valid all day. Children do not pay. The garden has benches and a café. \
The shop sells postcards. Please do not touch anything. Guided tours begin at noon.
"""
for i, (room, number) in enumerate(zip(ROOMS.split(","), NUMBERS.split(), strict=True)):
    shows = f"Room {number} shows {room.strip()}."
    rules += f"{shows} It is open from {8 + i % 3} to {16 + i % 4} o'clock.\n"
rules += (
    "The cloakroom is beside the entrance. Dogs stay outside. "
    "Photographs are welcome.\n"
)
prompt = (
    f"<|im_start|>system\n{rules}<|im_end|>\n"
    "<|im_start|>user\nWhere can I leave my coat?<|im_end|>\n<|im_start|>assistant\n"
)

log = EventLog()  # writes down what the engine does, for the picture below
llm = LLM("smollm2", publish="finish", single_flight="none", observer=log)
answer = SamplingParams(temperature=0, max_tokens=24)

# %% [markdown]
# Both at once:

# %% name="together" claims="R01"
first, second = llm.generate([prompt, prompt], answer)


def show(name: str, output) -> None:
    size, cached = len(output.prompt_token_ids), output.num_cached_tokens
    print(f"{name:7} {cached:3} of {size} prompt tokens reused")
    print(f"  {output.outputs[0].text!r}")


show("first", first)
show("second", second)

# %% [markdown]
# Nothing. Not "a little less than hoped": [zero](#together) tokens. The prompt was computed twice, from
# the first token to the last.
#
# So the cache is broken? A third visitor comes when the first two have left, with the same
# question.

# %% name="later" claims="R02 R03"
third = llm.generate(prompt, answer)[0]
show("third", third)

# %% [markdown]
# [480 of 493](#later), which is everything that this cache can give: 30 full pages (chapter 2). The
# cache works. It was on the whole time. It had nothing to offer when the second request
# asked, because the first one had not *published* anything yet. With `publish="finish"`, as
# set in the first cell, an engine publishes what a request computed when the request has
# finished, and by then the second one had long computed its own.
#
# Zero hits do not mean a broken cache. Between "the same tokens" and "tokens reused" there
# is a chain of decisions, and each can be the one that says no.

# %% tags=["hide-input"] figure="puzzle.svg" name="puzzle" claims="R01"
from minivllm.drawing import draw_rows, rows_of_steps

rows = rows_of_steps(event.details["chunks"] for event in log.of("schedule"))
one, two, three = rows.values()
begins, ends = three[0][0], three[-1][0] + three[-1][1]
cache = [
    (0, begins, "free", "empty"),
    (begins, ends - begins, "published", f"{third.num_cached_tokens} tokens"),
]
draw_rows(
    [("first", one), ("second", two), ("third", three), ("in the cache", cache)],
    caption="Steps of the run above, from left to right; a step is as wide as its work. "
    "With a number: that many prompt tokens are computed. 'decodes': one output token a step. "
    "The cache stays empty until the first two have finished, so both compute everything; the "
    "third finds pages (green) and computes the rest.",
)

# %% [markdown]
# ## Three questions
#
# A good share of this book is about keeping three questions apart:
#
# 1. *When does a page become visible?* When its owner ends, when its prompt is done, after
#    each step, or even before it is computed?
# 2. *Does another request wait for it?* The second visitor could have waited for the first
#    one's work, and would have had an answer sooner than by doing it again. Or later.
# 3. *When does the wait end?* When the owner has finished, or as soon as the prompt is
#    computed?
#
# vLLM and SGLang, the two open engines that most people run, answer them differently. The
# engine of this book makes the answers options, so that the difference can be measured in one
# run: `publish` is the first question (chapter 9), `single_flight` the second and the third
# (chapters 10 and 11). The run above took the answers with which the puzzle was first met:
# visible at the end, and nobody waits.
#
# ## How the book works
#
# Each chapter opens with a question and something that fails, and builds the part that
# answers it. The cells marked with a file name, such as `minivllm/radix.py`, *are* that
# file: the package is exported from the chapters, and a test compares the two. All outputs
# come from runs and are checked again by the tests.
#
# Chapters 1 to 4 need no model: what a KV cache keeps (with one small attention head in
# PyTorch), how a prefix is named and found, and who owns a page. What they export needs no
# torch either. Chapters 5 and 6 build the model and load real weights.
# Chapter 7 puts requests into batches, and chapter 8 replaces the machine by a clock, so that
# policies can be compared without one. Chapters 9 to 11 take up the three questions. Chapter 14
# closes the engine up, behind the three lines that every user of vLLM knows, and chapter 15
# measures.
#
# ## Exercise
#
# How many tokens of the third request's prompt were computed? And if the prompt had been 496
# tokens long, exactly 31 pages of 16, how many would a third request have found in the cache?
# (Not 496: think about what is needed to choose the first output token.)

# %% tags=["solution"] name="computed"
computed = len(third.prompt_token_ids) - third.num_cached_tokens

head, tail = third.prompt_token_ids[:-4], third.prompt_token_ids[-4:]
longer = [*head, 11, 12, 13, *tail]
for _ in range(2):
    again = llm.generate(longer, SamplingParams(temperature=0, max_tokens=1))[0]
print(
    "exercise:",
    computed,
    "computed ·",
    again.num_cached_tokens,
    "of",
    len(longer),
    "cached",
)

# %%
assert (computed, again.num_cached_tokens, len(longer)) == (13, 495, 496)

# %% [markdown]
# At least one token must go through the model, because the cache keeps keys and values and
# no logits. This engine computes exactly one. Others compute the last page again and report
# 480.
