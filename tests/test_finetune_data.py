# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F811 a fixture of another file
"""What fine-tuning makes of data: packed documents, the learned part of chats and completions, rows that are wrong."""

import json
import shutil
import sys

import pytest
import torch
import yaml
from datasets import Dataset
from rounding import all_in_fp64
from test_finetune import CHAT_TEMPLATE, fields, folder, write_jsonl  # noqa: F401 a fixture
from tiny_models import EVERY_FAMILY, convert, randomize_queries, tiny_base_config, tiny_base_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnres import AttnResConfig
from attnres.data import packing
from attnres.data.rows import tokenize_chat
from attnres.data.text import read_sample, train_tokenizer
from attnres.training import AttnResTrainer, finetune
from attnres.training.config import cannot_pack


# Their recurrent layers carry a state over the whole row
STATEFUL = {"qwen3_next", "kimi_linear"}
# transformers makes their masks without the positions
SEES_ALL = {"gpt_oss"}


def documents(*lengths):
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, 97, (length,), generator=generator).tolist() for length in lengths]
    return Dataset.from_list([{"input_ids": row, "labels": row} for row in ids])


def slices(row):
    """Where the documents of a packed row lie."""
    starts = [i for i, position in enumerate(row["position_ids"]) if position == 0]
    return zip(starts, [*starts[1:], len(row["position_ids"])])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_packed_documents_do_not_see_each_other(family):
    """The logits of a document in a packed row are those of the document alone, in fp64."""
    assert (cannot_pack(tiny_base_config(family)) is None) == (family not in STATEFUL)
    rows = packing.pack(documents(9, 7, 5, 8, 2), 16)
    batch = packing.collate_packed(rows.to_list())
    assert batch["input_ids"].shape == (2, 16) and "attention_mask" not in batch
    model = randomize_queries(convert(tiny_base_model(family), 3))
    kept_apart = family not in STATEFUL | SEES_ALL
    assert (packing.sees_other_documents(model) is None) == kept_apart
    # Here rounding is 1e-15 of the logits, and what a document sees of another is a part of them
    model.double().set_experts_implementation("eager")
    difference = 0.0
    with all_in_fp64():
        for training_path in (True, False):
            with torch.set_grad_enabled(training_path):
                packed = model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
            for i, row in enumerate(rows):
                for start, end in slices(row):
                    ids = torch.tensor([row["input_ids"][start:end]])
                    alone = model(ids, use_cache=False).logits[0]
                    difference = max(difference, (packed[i, start:end] - alone).abs().max().item())
    if kept_apart:
        assert 0 < difference < 1e-11
    else:
        assert difference > 1e-3, "it would be possible after all"


def test_loss_of_packed_rows(folder):
    """It is the loss of the documents by themselves: no first token is predicted from the document in front."""
    rows, alone = packing.pack(documents(9, 7, 5, 8, 3), 16), documents(9, 7, 5, 8, 3)
    model = randomize_queries(convert(tiny_base_model("llama"), 3)).double()
    loss = model(**packing.collate_packed(rows.to_list()), use_cache=False).loss
    losses = []
    for row in alone:
        ids = torch.tensor([row["input_ids"]])
        losses += [model(ids, labels=ids).loss] * (len(row["labels"]) - 1)
    torch.testing.assert_close(loss, torch.stack(losses).mean())


def test_packing_loses_nothing_and_learns_nothing_twice():
    texts = documents(40, 1, 7, 16, 33, 2)
    rows = packing.pack(texts, 16)
    assert all(len(row["input_ids"]) <= 16 for row in rows)
    pieces = [tuple(row["input_ids"][start:end]) for row in rows for start, end in slices(row)]
    expected = [tuple(ids[i : i + 16]) for ids in texts["input_ids"] for i in range(0, len(ids), 16)]
    # a piece of one token may be left out with its row: there is nothing to learn from it
    assert sorted(piece for piece in pieces if len(piece) > 1) == sorted(ids for ids in expected if len(ids) > 1)
    assert sum(label != -100 for row in rows for label in row["labels"]) == sum(len(ids) - 1 for ids in expected)


def test_evaluation_and_depth_figures_keep_documents_apart(folder, tmp_path, monkeypatch):
    """No batch of a packed run comes without the positions, and none with an attention mask in front of them."""
    seen = []
    compute_loss = AttnResTrainer.compute_loss

    def spy(self, model, inputs, *args, **kwargs):
        seen.append((model.training, {name: value.clone() for name, value in inputs.items()}))
        return compute_loss(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(AttnResTrainer, "compute_loss", spy)
    write_jsonl(tmp_path / "data.jsonl", [{"text": f"{i} and {i} is {2 * i}."} for i in range(100)])
    result = finetune(fields(folder, tmp_path / "out", dataset=str(tmp_path / "data.jsonl"), max_steps=2))
    assert {training for training, _ in seen} == {True, False}
    for _, inputs in seen:
        assert "attention_mask" not in inputs and (inputs["position_ids"] == 0).sum() > len(inputs["input_ids"])
    assert result.history[0]["depth_entropy"] == pytest.approx(1)  # queries of zero


def write_model_and_text(family, tmp_path):
    tokenizer = train_tokenizer([read_sample()] * 3, vocab_size=400)
    convert(tiny_base_model(family, vocab_size=len(tokenizer)), 3).save_pretrained(tmp_path / "blocks-of-3")
    tokenizer.save_pretrained(tmp_path / "blocks-of-3")
    write_jsonl(tmp_path / "text.jsonl", [{"text": text} for text in read_sample().split("\n\n") * 2 if text.strip()])


@pytest.mark.slow
def test_hybrids_are_not_packed(tmp_path, capsys):
    """Said in a line by default, an error where packing was asked for."""
    write_model_and_text("qwen3_next", tmp_path)
    reason = "the layers of a qwen3_next that carry a state would carry it from one document to the next"
    with pytest.raises(ValueError, match=f"`packing: true` is not possible here: {reason}. Set `packing: false`."):
        finetune(fields(tmp_path, tmp_path / "out", packing=True))
    finetune(fields(tmp_path, tmp_path / "out", max_steps=1))
    assert f"Rows are not packed: {reason}." in capsys.readouterr().out


@pytest.mark.slow
def test_the_data_is_read_once(folder, tmp_path, monkeypatch, capsys):
    """Also where the loaded model turns out not to keep documents apart, and rows are made anew."""
    module, read = sys.modules["attnres.training.finetune"], []
    read_documents = module.read_documents
    monkeypatch.setattr(module, "sees_other_documents", lambda model: "it is said")
    monkeypatch.setattr(module, "read_documents", lambda *args, **kw: read.append(args) or read_documents(*args, **kw))
    result = finetune(fields(folder, tmp_path / "out", max_steps=1))
    assert len(read) == 1 and "Rows are not packed: it is said." in capsys.readouterr().out
    assert result.losses == finetune(fields(folder, tmp_path / "apart", max_steps=1, packing=False)).losses


@pytest.mark.slow
def test_whether_documents_are_kept_apart_is_tried(tmp_path, capsys):
    """Only the model shows it, once it is loaded. Rows are not packed then, and nothing is left of a refused run."""
    write_model_and_text("gpt_oss", tmp_path)
    reason = "`gpt_oss` with `attn_implementation='eager'` does not keep documents in one row apart"
    with pytest.raises(ValueError, match=f"`packing: true` is not possible here: {reason}. Set `packing: false`."):
        finetune(fields(tmp_path, tmp_path / "out", packing=True))
    assert not (tmp_path / "out").exists()
    result = finetune(fields(tmp_path, tmp_path / "out", max_steps=1))
    assert f"Rows are not packed: {reason}." in capsys.readouterr().out
    apart = finetune(fields(tmp_path, tmp_path / "apart", max_steps=1, packing=False))
    assert result.losses == apart.losses
    shutil.rmtree(tmp_path / "out/final")  # as if it had been killed, and is resumed
    assert finetune(fields(tmp_path, tmp_path / "out", max_steps=1)).losses[-1] == apart.losses[-1]


LEAKS = {
    "mean of the row": lambda h: h + 1e-6 * h.mean(1, keepdim=True),
    "last token of the row in front": lambda h: h + torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], 1),
    "first token": lambda h: h * (1 + 1e-3 * h[:, :1]),
    "sum so far": lambda h: h + h.cumsum(1),
    "largest": lambda h: h + h.amax(1, keepdim=True),
    "row as a batch norm": lambda h: h / h.std(1, keepdim=True),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("leak", [None, *LEAKS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_small_leak_is_seen(leak, dtype):
    """In one sublayer of one layer. The trial leaves nothing behind: no gradient, no hook, no other mode."""
    model = randomize_queries(convert(tiny_base_model("llama"), 3)).to(dtype).train()
    if leak is not None:
        model.model.layers[-1].self_attn.register_forward_hook(lambda m, args, out: (LEAKS[leak](out[0]), *out[1:]))
    model.gradient_checkpointing_enable()
    model.requires_grad_(False).lm_head.requires_grad_(True)  # frozen, as with an adapter
    state, hooks = torch.get_rng_state(), list(model.get_input_embeddings()._forward_hooks)
    assert (packing.sees_other_documents(model) is None) == (leak is None)
    assert torch.equal(state, torch.get_rng_state()) and all(module.training for module in model.modules())
    assert list(model.get_input_embeddings()._forward_hooks) == hooks
    assert all(parameter.grad is None for parameter in model.parameters())


def test_keys_chosen_in_the_whole_row_are_not_packed():
    """An index without a gradient, over more keys than a trial has: the config says it."""
    for family in ("llama", "deepseek_v3"):
        config = AttnResConfig.from_base_config(tiny_base_config(family), block_size=2)
        assert cannot_pack(config) is None
        config.index_topk = 2048
        assert "chooses its keys among those of all documents" in cannot_pack(config)


# --- chats


CHAT = [
    {"role": "user", "content": "two and two"},
    {"role": "assistant", "content": "four"},
    {"role": "user", "content": "and three more"},
    {"role": "assistant", "content": "  seven "},
]
PLAIN = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# As Qwen3's: the last turn starts with thoughts, and earlier ones are rendered without
THINKING = (
    "{% for message in messages %}<{{ message.role }}>{% if message.role == 'assistant' and loop.last %}"
    "<think></think>{% endif %}{{ message.content.split('</think>')[-1].strip() }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# As DeepSeek R1's: the generation prompt has more than a turn in training
PROMPTED = PLAIN.replace("<assistant>{% endif %}", "<assistant><think>\n{% endif %}")


def learned(tokenizer, messages):
    row = tokenize_chat({"messages": messages}, tokenizer)
    runs, last = [], False
    for i, label in zip(row["input_ids"], row["labels"]):
        if label != -100:
            assert label == i
            runs = [*runs[:-1], [*runs[-1], i]] if last else [*runs, [i]]
        last = label != -100
    assert len(row["labels"]) == len(row["input_ids"])
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize(
    "template, expected",
    [
        (PLAIN, ["four{eos}\n", "  seven {eos}\n"]),
        (THINKING, ["four{eos}\n", "<think></think>seven{eos}\n"]),
        (PROMPTED, ["four{eos}\n", "  seven {eos}\n"]),
        (CHAT_TEMPLATE, ["four{eos}", "  seven {eos}"]),
    ],
    ids=["plain", "thinking", "prompted", "marked"],
)
def test_every_turn_of_the_assistant_is_learned_and_nothing_else(folder, template, expected):
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    tokenizer.chat_template = template
    expected = [text.format(eos=tokenizer.eos_token) for text in expected]
    assert learned(tokenizer, CHAT) == expected
    assert learned(tokenizer, CHAT[:1]) == []  # without an answer, nothing
    system = [{"role": "system", "content": "be brief"}]
    assert learned(tokenizer, system + CHAT) == expected
    assert learned(tokenizer, CHAT[1:]) == expected  # the assistant speaks first
    words = [{"role": "user", "content": "four"}, {"role": "assistant", "content": "four"}]  # what was asked, repeated
    assert len(learned(tokenizer, words)) == 1
    multibyte = [{"role": "user", "content": "größer 🙂"}, {"role": "assistant", "content": "größer 🙂"}]
    assert "größer 🙂" in learned(tokenizer, multibyte)[0]


def test_a_template_whose_turns_cannot_be_told_apart_is_refused(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    tokenizer.chat_template = "{% for m in messages %}[{{ messages | length }}{{ m.role }}]{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match=r"message 1 of a chat, .* put \{% generation %\} and \{% endgeneration %\}"):
        tokenize_chat({"messages": CHAT}, tokenizer)


def test_tool_calls_are_learned(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].name }}()"
        "{% endif %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}
    assert learned(tokenizer, [CHAT[0], call, *CHAT[2:]])[0] == f"add(){tokenizer.eos_token}"


# --- show-batch


@pytest.mark.one_in(2)
@pytest.mark.parametrize("packing", [True, False])
def test_show_batch(folder, tmp_path, monkeypatch, capsys, run_attnres, packing):
    """It is the first batch of the run, with marks that need no colour, before weights are read."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "blocks-of-3")
    tokenizer.chat_template = PLAIN
    model = tmp_path / "model"
    AutoModelForCausalLM.from_pretrained(folder / "blocks-of-3").save_pretrained(model)
    tokenizer.save_pretrained(model)
    chats = [
        [{"role": "user", "content": f"[b]add[/b] {i}"}, {"role": "assistant", "content": f"{i} [red]⟦"}]
        for i in range(60)
    ]
    write_jsonl(tmp_path / "chat.jsonl", [{"messages": chat} for chat in chats])
    config = fields(folder, tmp_path / "out", model=str(model), dataset=str(tmp_path / "chat.jsonl"), max_steps=1)
    config |= {"packing": packing, "max_length": 64}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    with monkeypatch.context() as patch:
        patch.setattr(AutoModelForCausalLM, "from_pretrained", None)
        assert run_attnres("finetune", tmp_path / "run.yaml", "--show-batch") == 0
    shown = capsys.readouterr().out
    assert not (tmp_path / "out").exists()

    batches = []
    training_step = AttnResTrainer.training_step

    def spy(self, model, inputs, *args, **kwargs):
        batches.append(inputs)
        return training_step(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(AttnResTrainer, "training_step", spy)
    finetune(config)
    numbers = [tokenizer.decode(ids).split("add[/b] ")[1:] for ids in batches[0]["input_ids"]]
    numbers = [text.split("<")[0] for row in numbers for text in row]
    assert len(numbers) >= 4 and "[b]add[/b]" in shown and "[red]" in shown
    places = [shown.index(f"<assistant>⟦{number} [red]⟦{tokenizer.eos_token}") for number in numbers]
    assert places == sorted(places), "another order than in training"
    assert shown.count("<assistant>⟦") == len(numbers)


# --- rows that are wrong


@pytest.mark.parametrize(
    "rows, message",
    [
        ([{"text": "a b c"}, {"story": "once"}] * 30, "A row of the data has nothing in `text`. It is row 1"),
        ([{"text": None}] * 60, "A row of the data has nothing in `text`. It is row 0"),
        ([{"text": 5}] * 60, "A row of the data has 5, which is not text, in `text`. It is row 0"),
        ([{"text": ["a", "b"]}] * 60, "which is not text, in `text`"),
        ([{"text": ""}] * 60, "has 0 documents with something to learn"),
        ([{"text": " \n"}] * 60, "has 0 documents with something to learn"),
        ([{"messages": CHAT}, {"text": "a b c"}] * 30, "A row of the data has None in `messages`"),
        ([{"messages": "hello"}] * 60, "A row of the data has 'hello' in `messages`"),
        ([{"messages": [{"from": "human", "value": "a"}]}] * 60, "which is not a list of `role` and `content`"),
        ([{"messages": []}] * 60, "has 0 documents with something to learn"),
        ([{"messages": CHAT[:1]}] * 60, "has 0 documents with something to learn"),
        ([{"messages": [{"role": "user", "content": None}, CHAT[1]]}] * 60, "The chat template fails on a chat"),
        ([{"prompt": "a", "completion": None}] * 60, "A row of the data has nothing in `completion`"),
        ([{"prompt": CHAT[:1], "completion": CHAT[1:2]}] * 60, "which is not text, in `prompt`"),
        ([{"prompt": "a", "answer": "b"}] * 60, "The data has the columns prompt, answer. It needs `text`"),
        (
            [{"prompt": "a b c " * 40, "completion": "d"}] * 60,
            "`dataset` has nothing to learn within `max_length: 32`",
        ),
    ],
    ids=lambda value: json.dumps(value[:2])[:50] if isinstance(value, list) else "",
)
def test_rows_that_are_wrong(folder, tmp_path, monkeypatch, capsys, run_attnres, rows, message):
    """One line that says which row, before weights are read and a folder is made."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "blocks-of-3")
    tokenizer.chat_template = PLAIN.replace("{{ message.content }}", "{{ 'a' + message.content }}")
    tokenizer.save_pretrained(tmp_path / "model")
    AttnResConfig.from_pretrained(folder / "blocks-of-3").save_pretrained(tmp_path / "model")
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    write_jsonl(tmp_path / "data.jsonl", rows)
    config = fields(folder, tmp_path / "out", model=str(tmp_path / "model"), dataset=str(tmp_path / "data.jsonl"))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    assert run_attnres("finetune", tmp_path / "run.yaml") == 1
    printed = capsys.readouterr().err
    assert message in " ".join(printed.split()) and "Traceback" not in printed
    assert not (tmp_path / "out").exists()


def test_empty_rows_are_counted(folder, tmp_path, capsys):
    lines = [{"text": f"{i} and {i} is {2 * i}."} for i in range(100)]
    write_jsonl(tmp_path / "data.jsonl", [{"text": ""}, {"text": " "}, *lines])
    finetune(fields(folder, tmp_path / "out", dataset=str(tmp_path / "data.jsonl"), max_steps=1))
    assert f"Skipped 2 of {len(lines) + 2} rows of {tmp_path}/data.jsonl," in capsys.readouterr().out


def test_rows_that_are_cut_are_counted(folder, tmp_path, capsys):
    write_jsonl(tmp_path / "data.jsonl", [{"prompt": "a", "completion": "b c " * 40}] * 20)
    finetune(fields(folder, tmp_path / "out", dataset=str(tmp_path / "data.jsonl"), max_steps=1))
    assert "19 of 19 rows of `dataset` are cut off at `max_length: 32` tokens" in capsys.readouterr().out


@pytest.mark.parametrize("field", ["split", "eval_split", "dataset_config"])
def test_files_have_no_splits(folder, tmp_path, field):
    with pytest.raises(ValueError, match="is a file or a folder of files, which has no (split|configuration) `test`"):
        finetune(fields(folder, tmp_path / "out", **{field: "test"}))


def test_what_is_trained_on_is_not_evaluated_on(folder, tmp_path):
    for changed in ({"eval_split": "train"}, {"eval_dataset": str(folder / "text.jsonl")}):
        with pytest.raises(ValueError, match="name the training data"):
            finetune(fields(folder, tmp_path / "out", **changed))
