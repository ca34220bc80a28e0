"""Episodes: turns between a real engine and real rollout functions in real processes; what hangs or crashes."""

import json
import os
import queue
import signal
import textwrap
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace

import numpy as np
import orjson
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout.collect.filters import invalid_reason
from rollout.collect.pending import PendingGroup, PendingResponse, pack_groups, unpack_groups
from rollout.collect.requests import make_sample
from rollout.config import DType, Routing
from rollout.data.arithmetic import TOKENS, save_tokenizer
from rollout.engine import wait_for
from rollout.episodes.config import EpisodeConfig
from rollout.episodes.running import turn_seed
from rollout.episodes.sampler import EPISODES, EpisodeSampler, with_episodes
from rollout.episodes.trial import try_episode
from rollout.torch.config import TorchEngineConfig
from rollout.torch.engine import TorchEngine
from rollout.types import FinishReason, GenerateRequest, Generation, Prompt, SamplingParams
from rollout.user_code.pool import UserCodeError
from rollout.user_code.worker import Worker
from tests.rollout.tiny_model import experts_chosen, write_tiny_model

EOS = TOKENS.index("<eos>")
EQUALS = TOKENS.index("=")
MAX_NEW_TOKENS = 24


class Tickets:
    """One engine as a sampler: what the engine group does, without Ray."""

    def __init__(self, engine):
        self.engine = engine
        self.asked = {}
        self.next = 0
        self.calls = 0

    def submit(self, requests):
        self.calls += 1
        tickets = list(range(self.next, self.next + len(requests)))
        self.next += len(requests)
        self.asked.update(zip(tickets, requests, strict=True))
        self.engine.submit(tickets, requests)
        return tickets

    def poll(self, timeout_s):
        return self.engine.poll(timeout_s)

    def abort(self, tickets):
        self.engine.abort(tickets)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_tiny_model(path, vocab_size=len(TOKENS))
    save_tokenizer(path)
    return path


@pytest.fixture
def engine(model_path):
    engine = TorchEngine(TorchEngineConfig(dtype=DType.float32), index=0, device="cpu", num_threads=None)
    engine.start(model_path)
    yield engine
    engine.stop()


@pytest.fixture
def episodes(engine, model_path, tmp_path):
    made = []

    def build(function, **config):
        if "\n" in function:
            path = tmp_path / "own_rollout.py"
            path.write_text(textwrap.dedent(function), encoding="utf-8")
            function = f"{path}:rollout"
        config = EpisodeConfig(function=function, **{"retry_pause_s": 0.01, "outage_wait_s": 0.0} | config)
        sampler = EpisodeSampler(Tickets(engine), config, tokenizer_file=model_path / "tokenizer.json")
        made.append(sampler)
        return sampler

    yield build
    for sampler in made:
        sampler.close()


def make_requests(count=6, *, stop=(EOS,), seed=0, max_new_tokens=MAX_NEW_TOKENS):
    return [
        GenerateRequest(
            prompt_id=index // 2,
            sample_index=index % 2,
            prompt_token_ids=[2 + index // 2 % 10, 12, 5, 13],
            sampling=SamplingParams(
                temperature=1.0, max_new_tokens=max_new_tokens, seed=seed + index, stop_token_ids=stop
            ),
            answer="7",
        )
        for index in range(count)
    ]


def as_a_step(sampler, requests):
    """The generations as a collector gets them."""
    return wait_for(sampler.submit(requests), sampler.poll, others=[])


def rescored(model_path, request, generation):
    """log-probs of all tokens by transformers, in one forward over the whole transcript."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    ids = torch.tensor([[*request.prompt_token_ids, *generation.token_ids]])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids, use_cache=False).logits[0], dim=-1)
    start = len(request.prompt_token_ids)
    return [logprobs[start + i - 1, token].item() for i, token in enumerate(generation.token_ids)]


ONE_TURN = """
    async def rollout(episode):
        await episode.generate()
"""


def test_an_episode_of_one_turn_is_what_the_engine_alone_gives(engine, episodes):
    requests = make_requests()
    plain = engine.generate(requests)
    for alone, episode in zip(plain, episodes(ONE_TURN).generate(requests), strict=True):
        # The requests beside it move the last bits of a log-prob, and decide who reads a shared prompt.
        assert episode.logprobs == pytest.approx(alone.logprobs, abs=1e-5)
        expected = replace(alone, logprobs=None, sampled=[True] * len(alone.token_ids), shared_prompt_tokens=0)
        assert replace(episode, logprobs=None, shared_prompt_tokens=0) == expected


def test_a_function_is_given_the_other_columns_and_the_engine_is_not(episodes):
    request = replace(make_requests(1)[0], row={"shown": [2, 3]})
    sampler = episodes("""
        async def rollout(episode):
            await episode.generate(max_new_tokens=2)
            episode.observe(episode.row["shown"])
    """)
    [generation] = sampler.generate([request])
    assert generation.token_ids[-2:] == [2, 3] and generation.sampled[-2:] == [False, False]
    assert request.for_engine() == replace(request, row={})


def test_further_parameters_have_the_values_of_the_config(episodes):
    source = """
        async def rollout(episode, shown, *, most):
            await episode.generate(max_new_tokens=most)
            episode.observe(shown)
    """
    sampler = episodes(source, arguments={"shown": [2, 3], "most": 1})
    [generation] = sampler.generate(make_requests(1))
    assert generation.token_ids[1:] == [2, 3] and generation.sampled == [True, False, False]


TWO_TURNS = """
    async def rollout(episode):
        first = await episode.generate(stop=["=", 5], max_new_tokens=6)
        assert first.text == episode.decode(first.token_ids)
        if first.stopped:
            assert first.stop_token_id in (13, 5, 1)
        shown = episode.observe("12+34=")
        assert shown == 6, shown
        await episode.generate(max_new_tokens=5)
        episode.observe([2, 3])
"""


def test_observed_tokens_are_shown_and_masked_and_what_was_sampled_is_untouched(episodes, model_path):
    requests = make_requests()
    for request, generation in zip(requests, episodes(TWO_TURNS).generate(requests), strict=True):
        assert generation.sampled is not None and generation.logprobs is not None
        text = "".join("s" if sampled else "o" for sampled in generation.sampled)
        first, rest = text.split("o", 1)
        assert 1 <= len(first) <= 6 and rest.startswith("ooooo")
        assert text.endswith("oo") and 1 <= text.count("s") - len(first) <= 5
        assert generation.token_ids[len(first) : len(first) + 6] == [3, 4, 12, 5, 6, 13]
        assert generation.token_ids[-2:] == [2, 3]
        scored = rescored(model_path, request, generation)
        for sampled, logprob, expected in zip(generation.sampled, generation.logprobs, scored, strict=True):
            assert logprob == (pytest.approx(expected, abs=2e-5) if sampled else 0.0)
        assert generation.finish_reason in (FinishReason.stop, FinishReason.length)
        assert generation.token_versions == [0] * len(generation.token_ids)


def test_written_tokens_have_no_support_and_sampled_ones_are_in_theirs(episodes):
    requests = [replace(r, sampling=replace(r.sampling, top_k=5, with_supports=True)) for r in make_requests()]
    for request, generation in zip(requests, episodes(TWO_TURNS).generate(requests), strict=True):
        assert invalid_reason(request, generation, policy_version=0) is None
        assert generation.supports.sizes.tolist() == [5 * sampled for sampled in generation.sampled]
        sample = make_sample(request, generation)
        assert sample.supports.sizes.tolist() == [5 * sampled for sampled in sample.response_mask.tolist()]


def test_the_routes_of_all_turns_are_those_of_one_forward(tmp_path):
    model = write_tiny_model(tmp_path / "model", model_type="qwen3_moe", vocab_size=len(TOKENS))
    save_tokenizer(tmp_path / "model")
    function = tmp_path / "own_rollout.py"
    function.write_text(textwrap.dedent(TWO_TURNS), encoding="utf-8")
    engine = TorchEngine(TorchEngineConfig(dtype=DType.float32), index=0, device="cpu", num_threads=None)
    engine.start(tmp_path / "model")
    config = EpisodeConfig(function=f"{function}:rollout")
    requests = [replace(r, sampling=replace(r.sampling, routes=Routing.replay)) for r in make_requests()]
    with closing(EpisodeSampler(Tickets(engine), config, tokenizer_file=tmp_path / "model/tokenizer.json")) as sampler:
        generations = sampler.generate(requests)
    engine.stop()
    for request, generation in zip(requests, generations, strict=True):
        assert invalid_reason(request, generation, policy_version=0) is None
        sample = make_sample(request, generation)
        expected = experts_chosen(model, sample.token_ids.tolist()).numpy()[: len(sample.routes)]
        assert sample.num_read <= len(sample.routes) < len(sample.token_ids)  # nobody reads what is shown last
        assert (np.sort(sample.routes.whole(), -1) == np.sort(expected, -1)).mean() > 0.99
        assert saved_and_loaded(request, generation).routes == generation.routes


def saved_and_loaded(request, generation):
    """The response as a checkpoint keeps it."""
    prompt = Prompt(prompt_id=0, token_ids=request.prompt_token_ids, text="", answer="")
    response = PendingResponse(request=request, generation=generation)
    saved = json.loads(json.dumps(pack_groups([PendingGroup(prompt=prompt, responses=[response])])))
    [group] = unpack_groups(saved, prompt=lambda _: prompt, request=lambda *_: request, keeps_tokens=True, group_size=1)
    return group.responses[0].generation


def test_a_response_that_ended_at_the_cap_is_not_sampled_again():
    [request] = make_requests(1, max_new_tokens=2)
    ended = Generation(
        token_ids=[2, 3], logprobs=[-1.0, -1.0], token_versions=[0, 0], finish_reason=FinishReason.length
    )
    assert saved_and_loaded(request, ended) == ended


def test_no_two_turns_draw_with_one_seed(episodes):
    sampler = episodes(TWO_TURNS)
    sampler.generate(make_requests(20))
    seeds = [request.sampling.seed for request in sampler._sampler.asked.values()]
    assert len(seeds) == len(set(seeds)) == 40
    assert turn_seed(7, 0) == 7 and 0 <= turn_seed(7, 1) < 2**31
    stops = Counter(request.sampling.stop_token_ids for request in sampler._sampler.asked.values())
    assert stops == {(EOS, 5, EQUALS): 20, (EOS,): 20}


LONG = """
    async def rollout(episode):
        while not episode.ended:
            turn = await episode.generate(max_new_tokens=3)
            episode.observe("1+1=2, 2+2=4")
"""


GREEDY = """
    async def rollout(episode):
        while True:
            await episode.generate(max_new_tokens=7)
            episode.tokens_left, episode.ended = 1000, False
"""


def test_a_function_that_gives_itself_more_tokens_costs_its_episode_alone(episodes):
    sampler = episodes(GREEDY)
    for generation in as_a_step(sampler, make_requests(2, stop=())):
        assert len(generation.token_ids) == MAX_NEW_TOKENS
        assert generation.finish_reason is FinishReason.failed
    assert "it asked for a turn, and no tokens are left" in sampler.take_stats().last_failure
    asked = [request.sampling.max_new_tokens for request in sampler._sampler.asked.values()]
    assert sorted(asked) == [3, 3, 7, 7, 7, 7, 7, 7]


def test_a_response_never_exceeds_its_limit(episodes):
    for generation in episodes(LONG).generate(make_requests(stop=())):
        assert len(generation.token_ids) == MAX_NEW_TOKENS
        assert generation.finish_reason is FinishReason.length
        assert generation.sampled is not None
        assert generation.sampled[:12] == [True] * 3 + [False] * 9


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("\n async def rollout(episode): raise ValueError('my bad')\n", "ValueError: my bad"),
        ("\n async def rollout(episode): pass\n", "it ended without having sampled anything"),
        ("\n async def rollout(episode): await episode.generate(stop=[''])\n", "stop has an empty text"),
        ("\n async def rollout(episode): await episode.generate(stop='=')\n", "stop must be a list"),
        (
            "\n async def rollout(episode): await episode.generate(stop=[10**9])\n",
            "a token id of stop must lie in [0, 1",
        ),
        ("\n async def rollout(episode): await episode.generate(stop=[1.0])\n", "of stop must be an integer, got 1.0"),
        ("\n async def rollout(episode): await episode.generate(max_new_tokens=2.5)\n", "must be an integer, got 2.5"),
        ("\n async def rollout(episode): episode.observe(b'1+1')\n", "text or a list of token ids, got bytes"),
        ("\n async def rollout(episode): episode.observe({1, 2})\n", "text or a list of token ids, got set"),
        ("\n async def rollout(episode): episode.observe(['12', '7'])\n", "of observe must be an integer, got '12'"),
        ("\n async def rollout(episode): episode.observe([True])\n", "of observe must be an integer, got True"),
        ("\n async def rollout(episode): episode.observe([10**9])\n", "a token id of observe must lie in [0, 1"),
        ("\n async def rollout(episode): episode.observe([-1])\n", "a token id of observe must lie in [0, 1"),
        ("\n async def rollout(episode): episode.observe('\u2603')\n", "the tokenizer has no tokens for"),
        (
            "\n async def rollout(episode):\n  while True: await episode.generate()\n",
            "EpisodeError: there are no tokens left",
        ),
    ],
)
def test_an_episode_whose_function_raises_is_dropped_by_name(episodes, function, message):
    sampler = episodes(function)
    assert {each.finish_reason for each in as_a_step(sampler, make_requests(stop=()))} == {FinishReason.failed}
    stats = sampler.take_stats()
    assert stats.failed == 6 and message in stats.last_failure


def test_failures_that_end_a_run_in_the_middle_of_a_step_are_told(engine, model_path, tmp_path, caplog):
    path = tmp_path / "own.py"
    path.write_text("async def rollout(episode):\n    raise ValueError('my bad')\n", encoding="utf-8")
    config = EpisodeConfig(function=f"{path}:rollout", max_tries=1)
    with pytest.raises(KeyError), with_episodes(Tickets(engine), config, model_path=model_path) as sampler:
        wait_for(sampler.submit(make_requests(3)), sampler.poll, others=[])
        raise KeyError
    assert "3 of 3 episodes failed; the last was prompt" in caplog.text and "ValueError: my bad (own.py" in caplog.text


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("\n def rollout(episode): pass\n", "must be `async def` with one parameter"),
        ("\n async def rollout(episode, more): pass\n", "must be `async def` with one parameter"),
        ("\n async def other(episode): pass\n", "has no function 'rollout'; it has other"),
        ("\n import nothing_of_this_name\n", "ModuleNotFoundError"),
    ],
)
def test_a_function_that_cannot_be_used_ends_with_its_name(episodes, function, message):
    with pytest.raises(UserCodeError, match=r"episode\.function=.*own_rollout\.py:rollout") as caught:
        episodes(function).generate(make_requests(1))
    assert message in str(caught.value)


HANGS_ONCE = """
    import os, time

    async def rollout(episode):
        turn = await episode.generate(max_new_tokens=4)
        if episode.prompt.startswith("1") and not os.path.exists(__file__ + ".hung"):
            open(__file__ + ".hung", "w").close()
            time.sleep(600)
        await episode.generate(max_new_tokens=4)
"""


def test_a_hang_costs_its_episode_and_the_others_of_its_worker_begin_anew(episodes):
    sampler = episodes(HANGS_ONCE, timeout_s=3.0)
    begin = time.monotonic()
    generations = as_a_step(sampler, make_requests(stop=()))
    assert time.monotonic() - begin < 90
    stats = sampler.take_stats()
    assert stats.failed == 1 and 1 <= stats.restarted <= 5
    assert "no answer within 3 s" in stats.last_failure
    [failed] = [each for each in generations if each.finish_reason is FinishReason.failed]
    assert len(failed.token_ids) == 4
    assert sum(each.finish_reason is FinishReason.length and len(each.token_ids) == 8 for each in generations) == 5


def test_a_crash_costs_the_episode_whose_code_ran(episodes):
    crash = """
        import os

        async def rollout(episode):
            turn = await episode.generate(max_new_tokens=4)
            if episode.prompt.startswith("1"):
                os._exit(3)
            await episode.generate(max_new_tokens=4)
    """
    sampler = episodes(crash)
    generations = as_a_step(sampler, make_requests(stop=()))
    stats = sampler.take_stats()
    assert [each.finish_reason is FinishReason.failed for each in generations] == [
        False,
        False,
        True,
        True,
        False,
        False,
    ]
    assert stats.failed == 2 and "the worker ended with exit status 3" in stats.last_failure


@pytest.mark.scenario(41)
def test_a_killed_worker_is_replaced_and_its_episodes_give_what_they_would_have_given(episodes):
    sampler = episodes(TWO_TURNS)
    expected = sampler.generate(make_requests())
    [keeper] = [each for each in psutil.Process().children() if "rollout.episodes.child" in each.cmdline()]
    [child] = keeper.children()
    child.suspend()  # so that it is killed in the middle of its work
    tickets = sampler.submit(make_requests())
    end = time.monotonic() + 60
    while sum(len(each.calls) for each in sampler._pool._core.workers) < 6:
        assert time.monotonic() < end
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    found = {}
    while len(found) < 6:
        found.update(sampler.poll(5.0))
    assert [found[ticket].token_ids for ticket in tickets] == [each.token_ids for each in expected]
    assert sampler.take_stats().restarted == 6


def test_aborted_episodes_come_back_with_what_they_have(episodes):
    slow = """
        import asyncio

        async def rollout(episode):
            await episode.generate(max_new_tokens=3)
            await asyncio.sleep(600)
    """
    sampler = episodes(slow)
    tickets = sampler.submit(make_requests(stop=()))
    end = time.monotonic() + 60
    while sampler._sampler.next < 6 or sampler._of_engine_ticket:
        assert time.monotonic() < end
        sampler.poll(0.05)
    sampler.abort(tickets[:2])
    sampler.abort(tickets[:2])
    assert {ticket for ticket, _ in sampler.poll(1.0)} == set(tickets[:2])
    assert sampler.unfinished == 4
    sampler.abort(None)
    rest = dict(sampler.poll(1.0))
    assert {len(each.token_ids) for each in rest.values()} == {3}
    assert {each.finish_reason for each in rest.values()} == {FinishReason.abort}
    assert sampler.unfinished == 0 and sampler.poll(0.0) == []


def test_the_calculator_answers_sums_and_nothing_else(episodes):
    generations = episodes("calculator").generate(make_requests(30, stop=(EOS,), max_new_tokens=64))
    assert any(False in (each.sampled or []) for each in generations)
    for generation in generations:
        text, known = "", False
        for token, sampled in zip(generation.token_ids, generation.sampled or [], strict=True):
            if not sampled and not known:
                terms = text.rsplit("=", 2)[-2]
                digits = terms[len(terms.rstrip("0123456789+")) :].lstrip("+")
                known = True
                start = len(text)
            elif sampled and known:
                assert text[start:] == str(sum(int(term) for term in digits.split("+") if term)), (text, digits)
                known = False
            text += TOKENS[token] if token > 1 else ""


def test_generate_leaves_the_episodes_of_others_to_poll(episodes):
    """As an evaluation does while later steps are sampled."""
    sampler = episodes(ONE_TURN)
    earlier = sampler.submit(make_requests(4))
    generations = sampler.generate(make_requests(6, seed=100))
    assert len(generations) == 6
    found = {}
    while len(found) < 4:
        found.update(sampler.poll(5.0))
    assert set(found) == set(earlier) and sampler.unfinished == 0
    assert sampler.take_stats().ended == 4  # an evaluation is no part of the step


def test_turns_that_are_wanted_together_are_one_call(episodes):
    sampler = episodes(ONE_TURN, num_workers=1)
    assert len(sampler.generate(make_requests(60))) == 60
    assert sampler._sampler.calls < 30


def test_a_worker_that_is_killed_from_outside_costs_no_episode(episodes):
    sampler = episodes("""
        import os

        async def rollout(episode):
            await episode.generate(max_new_tokens=4)
            if not os.path.exists(__file__ + ".killed"):
                open(__file__ + ".killed", "w").close()
                os.kill(os.getpid(), 9)
            await episode.generate(max_new_tokens=4)
    """)
    generations = as_a_step(sampler, make_requests(stop=()))
    stats = sampler.take_stats()
    assert stats.failed == 0 and stats.restarted == 6
    assert {len(each.token_ids) for each in generations} == {8}


def test_a_function_that_fails_to_load_once_does_not_end_the_run(episodes):
    sampler = episodes("""
        import os

        with open(__file__ + ".loads", "a") as loads:
            loads.write("x")
            number = loads.tell()
        if number == 2:
            raise OSError("the disk is busy")

        async def rollout(episode):
            await episode.generate(max_new_tokens=4)
            if number == 1 and episode.prompt.startswith("1"):
                os._exit(3)
    """)
    generations = as_a_step(sampler, make_requests(2, stop=()) + make_requests(6, stop=())[2:4])
    assert sum(each.finish_reason is FinishReason.length for each in generations) >= 2


def test_a_row_that_cannot_be_sent_and_a_turn_that_is_not_awaited_cost_their_episodes(episodes):
    deep = []
    for _ in range(300):
        deep = [deep]
    sampler = episodes("""
        import asyncio

        async def rollout(episode):
            if episode.prompt.startswith("1"):
                asyncio.get_running_loop().create_task(episode.generate())  # ends long after the function
                await asyncio.sleep(0)
                return
            await episode.generate(max_new_tokens=4)
    """)
    first, *rest = make_requests(6, stop=(), max_new_tokens=400)
    generations = as_a_step(sampler, [replace(first, row={"deep": deep}), *rest])
    failed = [each.finish_reason is FinishReason.failed for each in generations]
    assert failed == [True, False, True, True, False, False]


# ---------------------------------------------------------------- deadlines of the function's own, slow imports


def test_a_turn_that_the_function_waits_for_too_short_is_withdrawn_and_costs_nobody(episodes, engine, monkeypatch):
    """The function goes on without the turn; the response has none of its tokens."""
    sampler = episodes("""
        import asyncio

        async def rollout(episode):
            await episode.generate(max_new_tokens=2)
            if episode.prompt.startswith("1"):
                try:
                    await asyncio.wait_for(episode.generate(), 0.0001)
                except TimeoutError:
                    pass
            episode.observe("1+1")
            await episode.generate(max_new_tokens=2)
    """)
    generations = as_a_step(sampler, make_requests(stop=()))
    stats = sampler.take_stats()
    assert (stats.failed, stats.restarted) == (0, 0), stats.last_failure
    for generation in generations:
        assert generation.sampled == [True] * 2 + [False] * 3 + [True] * 2
    assert len(sampler._pool._core.workers) == 1


def test_an_answer_that_comes_after_its_turn_was_given_up_is_not_taken_for_the_next(model_path, tmp_path):
    """The parent may have sent it before it hears of that."""
    (tmp_path / "own.py").write_text(
        textwrap.dedent("""
            import asyncio

            async def rollout(episode):
                try:
                    await asyncio.wait_for(episode.generate(), 0.2)
                except TimeoutError:
                    pass
                turn = await episode.generate()
                episode.observe(turn.token_ids)
        """)
    )
    inbox = queue.SimpleQueue()
    worker = Worker(EPISODES, [f"{tmp_path}/own.py:rollout", str(model_path / "tokenizer.json"), "{}"], inbox)
    item = {"token_ids": [2], "answer": "7", "row": {}, "max_new_tokens": 9}

    def answer(question, tokens):
        value = {"token_ids": tokens, "stopped": True, "is_end": True}
        worker.say(orjson.dumps({"answer": question, "value": value}))

    def said(word):
        while word not in (message := orjson.loads(inbox.get(timeout=60).line)):
            pass
        return message

    try:
        worker.say(orjson.dumps({"call": 5, "timeout_s": 60, "items": [item]}))
        first, second = said("ask"), said("ask")
        answer(first["question"], [4, 4])
        answer(second["question"], [5])
        assert said("replies")["replies"] == [{"observed": [5]}]
    finally:
        worker.kill()


def test_a_deadline_around_a_turn_that_has_arrived_leaves_the_turn_in_the_response(episodes, model_path):
    requests = make_requests(2, stop=())
    source = """
        import asyncio

        async def rollout(episode):
            turn = await asyncio.wait_for(episode.generate(max_new_tokens=4), 60)
            episode.observe(turn.token_ids)
    """
    for request, generation in zip(requests, episodes(source).generate(requests), strict=True):
        assert generation.token_ids[:4] == generation.token_ids[4:]
        assert generation.logprobs[:4] == pytest.approx(rescored(model_path, request, generation)[:4], abs=1e-4)


def test_the_time_of_an_import_is_not_the_time_of_an_episode(episodes):
    sampler = episodes(
        "import time\ntime.sleep(3)\nasync def rollout(episode):\n    await episode.generate()\n", timeout_s=1.0
    )
    as_a_step(sampler, make_requests())
    stats = sampler.take_stats()
    assert (stats.failed, stats.restarted) == (0, 0)


def test_the_time_of_the_engines_is_not_the_time_of_the_function(episodes, monkeypatch):
    sampler = episodes(TWO_TURNS, timeout_s=0.7)
    poll = sampler._sampler.poll
    monkeypatch.setattr(sampler._sampler, "poll", lambda timeout_s: (time.sleep(1.0), poll(timeout_s))[1])
    as_a_step(sampler, make_requests(2))
    stats = sampler.take_stats()
    assert (stats.failed, stats.restarted) == (0, 0)


# ---------------------------------------------------------------- where a turn ends


def test_a_turn_ends_with_a_text_of_several_tokens_and_samples_what_it_would_have_sampled(episodes):
    """The text is found where it is; until then the turn is the one without a stop, seeds of the parts apart."""
    source = """
        async def rollout(episode):
            turn = await episode.generate(stop=["1+", "="])
            assert turn.stopped == (turn.text.endswith(("1+", "=")) or turn.stop_token_id is not None), turn
            for text in ("1+", "="):
                assert text not in turn.text[:-1], turn
            if turn.stopped:
                episode.observe("7" * episode.tokens_left)
    """
    sampler = episodes(source)
    generations = as_a_step(sampler, make_requests(60, stop=(EOS,), seed=5))
    stats = sampler.take_stats()
    assert stats.failed == 0, stats.last_failure
    texts = [
        "".join(TOKENS[token] for token, own in zip(g.token_ids, g.sampled, strict=True) if own) for g in generations
    ]
    assert {text[-2:] for text in texts} >= {"1+"} and any(text.endswith("=") for text in texts)
    assert any("+" in text[:-2] for text in texts), "a + that does not end the text ends no turn"
    assert stats.turns == 60, "parts of a turn are no turns"


# ---------------------------------------------------------------- the trial before a run


@pytest.mark.parametrize(
    ("body", "reason", "num_turns"),
    [
        ("await episode.generate()", "", 1),
        ("while episode.tokens_left: await episode.generate(stop=['=', 'no such'])", "", 9),
        ("await episode.generate(stop=[''])", "EpisodeError: stop has an empty text", 0),
        ("await episode.generate(stop=['=<eos>'])", "EpisodeError: stop has '=<eos>': a special token", 0),
        ("pass", "it ended without having sampled anything", 0),
        ("global seen; seen += 1; assert seen > 2; await episode.generate()", "", 1),
        ("t = await episode.generate()\n    assert t.raw_text.startswith(t.text) and t.raw_text[len(t.text) :]", "", 1),
        ("await episode.generate()\n    raise ValueError('my bad')", "ValueError: my bad", 1),
        ("import time; time.sleep(60)", "no answer within 1 s", 0),
    ],
)
def test_a_function_is_tried_in_an_episode_before_a_run(model_path, tmp_path, body, reason, num_turns):
    (tmp_path / "own.py").write_text(f"seen = 0\nasync def rollout(episode):\n    {body}\n")
    prompt = Prompt(prompt_id=0, token_ids=[2, 12, 5, 13], text="0+3=", answer="7")
    sampling = SamplingParams(temperature=1.0, max_new_tokens=30, seed=0, stop_token_ids=(EOS,))
    config = EpisodeConfig(function=f"{tmp_path}/own.py:rollout", timeout_s=1.0, retry_pause_s=0.01)
    trial = try_episode(config, prompt, sampling, model_path / "tokenizer.json")
    assert reason in trial.reason and bool(trial.reason) == bool(reason)
    assert trial.num_turns == num_turns
