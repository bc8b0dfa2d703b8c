"""A turn's segments hold exactly its tokens, and tell apart who wrote them."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import Json, Trajectory, Turn, sequence
from art_cli.view.segments import TokenTexts, find_tokenizer, show_turns

END, START = "<|end|>", "<|start|>"


def tokenizer() -> Tokenizer:
    """A token per byte and per message end, like byte-level tokenizers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: id for id, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([START, END])
    return made


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> TokenTexts:
    run = RunDir(tmp_path_factory.mktemp("run"))
    run.base.mkdir()
    tokenizer().save(str(run.base / "tokenizer.json"))
    found = find_tokenizer(run)
    assert found is not None
    return found


def ids_of(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False).ids)


def rendered(messages: list[Json]) -> str:
    return "".join(f"{START}{message['role']}\n{message['content']}{END}\n" for message in messages)


def play(conversations: list[list[Json]]) -> Trajectory:
    """A trajectory with a turn per assistant message in all conversations; a prompt keeps the prefix shared with the
    previous turn."""
    turns: list[Turn] = []
    for conversation in conversations:
        for place, message in enumerate(conversation):
            if message["role"] != "assistant":
                continue
            whole = ids_of(rendered(conversation[:place]) + f"{START}assistant\n")
            sampled = ids_of(f"{message['content']}{END}")
            before = sequence(turns, len(turns) - 1) if turns else []
            kept = next((n for n, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), None)
            kept = min(len(before), len(whole)) if kept is None else kept
            turns.append(
                Turn(parent=len(turns) - 1 if turns and kept else None, kept=kept, prompt_ids=whole[kept:],
                     sampled_ids=sampled, logprobs=[-0.5] * len(sampled), raw_logprobs=None, step=0, temperature=1.0)
            )  # fmt: skip
    *branches, messages = conversations
    return Trajectory(id="a", group_id="g", group_size=1, index=0, messages=messages, branches=branches, turns=turns)


SYSTEM: Json = {"role": "system", "content": "You find mails."}


def said(role: str, content: str) -> Json:
    return {"role": role, "content": content}


def test_messages_tools_template_and_replies_are_told_apart(texts: TokenTexts) -> None:
    talk = [SYSTEM, said("user", "Wer schrieb über Käse 🧀?"), said("assistant", "look"), said("tool", "1 mail of Ann"),
            said("assistant", "Ann"), said("user", "sure?"), said("assistant", "yes")]  # fmt: skip
    turns = show_turns(play([talk]), texts, None)
    shown = [[(s.kind, s.text) for s in turn.segments if s.kind not in ("template", "context")] for turn in turns]
    assert shown == [
        [("message", "You find mails."), ("message", "Wer schrieb über Käse 🧀?"), ("sampled", f"look{END}")],
        [("tool", "1 mail of Ann"), ("sampled", f"Ann{END}")],
        [("message", "sure?"), ("sampled", f"yes{END}")],
    ]
    assert [(turn.conversation, turn.message) for turn in turns] == [(0, 2), (0, 4), (0, 6)]
    assert turns[1].segments[0].text == f"{rendered(talk[:2])}{START}assistant\nlook{END}"


def test_a_state_shown_anew_in_each_prompt_is_found_in_its_own_branch(texts: TokenTexts) -> None:
    boards = [
        [SYSTEM, said("user", board), said("assistant", move)] for board, move in (("0100", "up"), ("0120", "up"))
    ]
    turns = show_turns(play(boards), texts, None)
    assert [(turn.conversation, turn.message) for turn in turns] == [(1, 2), (0, 2)]
    assert [s.text for s in turns[1].segments if s.kind == "message"] == ["20"]  # "01" is kept from the first turn


WORDS = st.text(max_size=8).filter(lambda text: START not in text and END not in text)
TALKS = st.lists(
    st.lists(st.builds(said, st.sampled_from(["user", "assistant", "tool", "system"]), WORDS), min_size=1, max_size=6),
    min_size=1,
    max_size=3,
)


@pytest.mark.slow
@given(TALKS)
def test_segments_hold_every_token_once(texts: TokenTexts, talks: list[list[Json]]) -> None:
    trajectory = play(talks)
    for index, turn in enumerate(show_turns(trajectory, texts, None)):
        new = [segment for segment in turn.segments if segment.kind != "context"]
        recorded = trajectory.turns[index]
        assert [id for segment in new for id in segment.ids] == recorded.prompt_ids + recorded.sampled_ids
        assert sum(segment.num_tokens for segment in turn.segments) == len(sequence(trajectory.turns, index))
        for segment in new:
            assert segment.tokens is not None and "".join(segment.tokens) == segment.text
            assert len(segment.tokens) == len(segment.ids) == segment.num_tokens


@pytest.mark.slow
def test_ten_thousand_turns_and_foreign_tokens_are_shown(texts: TokenTexts) -> None:
    """One chain of 10,000 turns; ids that the tokenizer does not know; a turn that keeps more than there is."""
    turn = Turn(parent=None, kept=0, prompt_ids=[5, 10**9], sampled_ids=[-1], logprobs=[0.0], raw_logprobs=None, step=0,
                temperature=1.0)  # fmt: skip
    turns = [turn, *(Turn(parent=n, kept=10**12, prompt_ids=[7], sampled_ids=[8], logprobs=[0.0], raw_logprobs=None,
                          step=0, temperature=1.0) for n in range(9_999))]  # fmt: skip
    trajectory = Trajectory(id="a", group_id="g", group_size=1, index=0, turns=turns)
    shown = show_turns(trajectory, texts, None)
    assert [segment.text for segment in shown[0].segments][-1] == "<-1>"
    assert [segment.num_tokens for segment in shown[-1].segments] == [3 + 2 * 9_998, 1, 1]


def test_without_a_tokenizer_ids_and_logprobs_are_there(tmp_path: Path) -> None:
    talk = [SYSTEM, said("user", "a"), said("assistant", "b")]
    assert find_tokenizer(RunDir(tmp_path)) is None
    [turn] = show_turns(play([talk]), None, None)
    assert [(s.kind, s.text, s.tokens) for s in turn.segments] == [("template", "", None), ("sampled", "", None)]
    assert turn.segments[1].logprobs == [-0.5] * len(turn.segments[1].ids)
