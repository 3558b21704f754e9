"""Seeded fuzzes: rollouts, updates, files of problems and model folders, each with an oracle."""

import gzip
import json
import math
import random
import re
import shutil
import sys
from functools import partial

import pytest
import torch
import transformers
from conftest import ROPE, logits_of, tiny_checkpoint
from safetensors.torch import load_file, save_file
from test_grpo import papers_loss
from test_rollout import learned, limited, logits
from test_train import trainer, updated
from test_weights import POINTER
from torch.nn.utils.rnn import pad_sequence

import grpo
import lora
import model as decoder
import train
from ops import sampling
from rollout import Rollout, SamplingParams
from tasks import final_answer
from tools import adapter, weights
from tools.ends import one_sentence
from tools.environment import Answer, load_task
from tools.flags import parse

slow = partial(pytest.param, marks=pytest.mark.slow)

# --- rollouts


def tiny_model(folder, rng):
    """→ a random model of a random family and shape, whose lora_B is not zero."""
    heads = rng.choice([2, 4])
    family = rng.choice(["llama", "mistral", "qwen2", "qwen3"])
    tiny_checkpoint(
        folder,
        family,
        vocab_size=rng.randrange(13, 60),
        hidden_size=16 * rng.randint(1, 3),
        head_dim=8 * rng.randint(1, 3),
        num_hidden_layers=rng.randint(1, 2),
        num_attention_heads=heads,
        num_key_value_heads=heads // rng.choice([1, 2]),
        **{"sliding_window": None} if family == "mistral" else {},
    )
    return learned(decoder.load(weights.open(folder), "bf16", rank=2, alpha=4), 0.1)


def check_naive(m, r, params, step, first):
    """Naive decoding computes each row alone, and all of its tokens again for each new one. Token
    by token it draws what the row has, if each token is drawn from the logits of those before it,
    the first stop token is the last one, and the limit ends all others.
    """
    mask = r.answer_mask()
    row, place = mask.nonzero().T
    place = place - r.prompt_lengths[row]
    drawn = sampling.sample(logits(m, r), params.temperature, params.seed, step, first + row, place)
    assert torch.equal(r.tokens[mask], drawn[0])
    torch.testing.assert_close(r.logprobs[mask], drawn[1], atol=1e-4, rtol=0)
    stops = mask & torch.isin(r.tokens, torch.tensor(params.stop_ids, dtype=torch.int64))
    last = (r.prompt_lengths + r.lengths - 1)[:, None]
    assert torch.equal(stops.any(1), r.finished) and (stops.sum(1) == r.finished).all()
    assert torch.equal(stops.gather(1, last)[:, 0], r.finished)
    assert (r.finished | (r.lengths == params.max_new_tokens)).all()


@pytest.mark.parametrize("seed", [0, *map(slow, (1, 2, 3))])
def test_any_rollout_equals_naive_decoding(tmp_path, seed):
    """50 on five models: few pages of any size, so that rows are preempted; equal prompts too."""
    rng, preempted, ended = random.Random(seed), 0, 0
    for number in range(50):
        if number % 10 == 0:
            m = tiny_model(tmp_path / str(number), rng)
        V, G = m.config.vocab_size, rng.randint(1, 5)
        prompts = [rng.choices(range(V), k=rng.randint(1, 9)) for _ in range(rng.randint(1, 4))]
        prompts += rng.choices(prompts, k=rng.randint(0, 1))
        params = SamplingParams(
            max_new_tokens=rng.randint(1, 16),
            stop_ids=rng.sample(range(V), rng.randint(0, 3)),
            temperature=rng.choice([0.0, 0.5, 1.0, 2.0]),
            seed=rng.randrange(2**32),
        )
        sampler = limited(m, rng.randint(1, 5), slots=rng.randint(1, 20))
        sampler.pages = sampler._pages_of(max(map(len, prompts)) + params.max_new_tokens)
        sampler.pages += rng.randint(0, 2)
        step, first = rng.randrange(100), rng.randrange(1000)
        r = sampler.generate(prompts, G, params, step, first)
        asked = [row[:n] for row, n in zip(r.tokens.tolist(), r.prompt_lengths, strict=True)]
        assert asked == [prompt for prompt in prompts for _ in range(G)]
        check_naive(m, r, params, step, first)
        preempted += sampler.stats["preempted"]
        ended += int(r.finished.sum())
    assert preempted > 20 and ended > 50


# --- updates


def random_rollout(m, rng, P, G, temperature):
    """→ a Rollout of random tokens and lengths, whose recorded log-probabilities are near the
    model's.
    """
    T, V = 14, m.config.vocab_size
    tokens = torch.randint(V, (P * G, T))
    prompt_lengths = torch.tensor([rng.randint(1, 6) for _ in range(P)]).repeat_interleave(G)
    for row in range(P * G):
        tokens[row, : prompt_lengths[row]] = tokens[row // G * G, : prompt_lengths[row]]
    lengths = torch.tensor([rng.randint(1, 8) for _ in prompt_lengths])
    found = Rollout(tokens, None, lengths, torch.rand(P * G) < 0.7, prompt_lengths)
    with torch.no_grad():
        logprobs, _ = found.scored_by(m, temperature)
    recorded = logprobs + 0.5 * torch.randn(tokens.shape)
    return found._replace(logprobs=torch.where(found.answer_mask(), recorded, 0))


def by_formula(oracle, rewards):
    """→ a function in the place of Trainer.update: the same in fp64, by transformers' model with
    the adapter added to its weights, and the papers' formulas answer by answer.
    """

    def cut(values, rollout, shift=0):
        """(B, T) → each row's answer, side by side."""
        starts = (rollout.prompt_lengths - shift).tolist()
        rows = zip(values, starts, rollout.lengths.tolist(), strict=True)
        return pad_sequence([row[start : start + n] for row, start, n in rows], batch_first=True)

    def scored(layers, factors, rollout, temperature):
        changed = dict(oracle.named_parameters())
        for name, layer in layers.items():
            parent, _, module = name.rpartition(".")
            A = factors[f"{name}.lora_A"].split(layer.rank)
            B = factors[f"{name}.lora_B"].split(layer.splits)
            for part, a, b in zip(adapter.FUSED.get(module, [module]), A, B, strict=True):
                key = f"model.{parent}.{part}.weight"
                changed[key] = changed[key] + layer.scale * b @ a
        logits = torch.func.functional_call(oracle, changed, (rollout.tokens,)).logits
        logprobs = (logits / temperature).log_softmax(-1)[:, :-1]
        return cut(logprobs.gather(2, rollout.tokens[:, 1:, None])[..., 0], rollout, shift=1)

    def update(learner, experience, lr):
        rollout, flags, m = experience.rollout, learner.config, learner.model
        A = torch.tensor(rewards, dtype=torch.float64).view(-1, flags.group_size)
        A = A - A.mean(1, keepdim=True)
        if flags.loss != "dr_grpo":
            A = A / (A.std(1, keepdim=True) + 1e-4)
        counted = rollout.lengths * (rollout.finished | (flags.overlong != "mask"))
        recorded = cut(rollout.logprobs.double(), rollout)
        with torch.no_grad():
            reference = scored({}, {}, rollout, flags.temperature)
        old = recorded if flags.correction == "bypass" else None
        for _ in range(flags.updates_per_step):
            leaves = {n: p.detach().double().requires_grad_() for n, p in m.named_parameters()}
            new = scored(lora.lora_layers(m), leaves, rollout, flags.temperature)
            old = new.detach() if old is None else old
            w = (old - recorded).exp().clamp(max=2) if flags.correction == "tis" else new**0
            given = flags.loss, new, old, w.detach(), reference, A.flatten(), flags.beta
            loss = papers_loss(*given, counted, flags.max_new_tokens)
            gradients = torch.autograd.grad(loss, leaves.values())
            for p, gradient in zip(m.parameters(), gradients, strict=True):
                p.grad = gradient.float()
            learner.optimizer.step()

    return update


@pytest.mark.parametrize("count", [8, slow(32)])
@pytest.mark.parametrize("loss", grpo.LOSSES)
def test_any_update_follows_the_formulas_in_fp64(tmp_path, monkeypatch, loss, count):
    """40 of each loss: all gradients, off-policy, with any correction, KL, masking and cut."""
    monkeypatch.setattr(grpo, "CISPO_MAX", 1.5)
    oracle = tiny_checkpoint(tmp_path, hidden_size=32, num_hidden_layers=2).double()
    rng, zeros = random.Random(f"{loss} {count}"), 0
    for _ in range(count):
        P, G = rng.randint(1, 3), rng.randint(2, 4)
        learner = trainer(
            tmp_path,
            loss=loss,
            prompts=P,
            group_size=G,
            correction=rng.choice(["none", "bypass", "tis"]),
            beta=rng.choice([0.0, 0.1]),
            overlong=rng.choice(["none", "mask"]),
            temperature=rng.choice([0.7, 1.0, 1.5]),
            updates_per_step=rng.randint(1, 3),
            clip_low=0.1,
            clip_high=0.3,
        )
        learner.budget.micro_tokens = rng.choice([15, 40, 10**6])
        learner.budget.recomputed = rng.randint(0, 2)
        rollout = random_rollout(learner.model, rng, P, G, learner.config.temperature)
        rewards = [rng.choice([0.0, 0.0, 1.0, rng.random()]) for _ in range(P * G)]
        answers = [Answer("", "", reward, {}) for reward in rewards]
        experience = learner.experience(rollout, answers)
        _, got = updated(learner, experience)
        _, want = updated(learner, experience, by_formula(oracle, rewards))
        if not got:  # nothing to learn: no optimizer step
            zeros += 1
            got = [0 * gradient for gradient in want]
        for one, other in zip(got, want, strict=True):
            assert (one - other).abs().max() <= 1e-4 * other.abs().max() + 1e-9
    assert zeros < count / 2


# --- files of problems

GOOD = [f'{{"question": "Is it {n}?", "answer": "#### {n}"}}' for n in range(8)]
TEXT = "\n".join(GOOD)
MORE = TEXT + "\n"
ANSWERS = "[1]|{}|null|true|7|NaN|-Infinity|1e400|''|' '|'\\ud83d'|" + "9" * 5000
RIGHT = {  # content → how many problems it has
    TEXT: 8,
    TEXT.replace("\n", "\r\n\r\n"): 8,
    "\ufeff" + TEXT: 8,
    TEXT.replace("}", ', "x": {"y": [null]}}'): 8,
    TEXT.replace("it", "是🍎\\u2028"): 8,
    TEXT.replace('"Is', '"\\u0000Is'): 8,
    TEXT.replace("\n", "\n \t"): 8,
    MORE + GOOD[3]: 8,
    TEXT.replace('"Is it ', '"').replace('?"', '"'): 8,
}
WRONG = [
    *("", "\n \n", "\0", "[]", "null", "7", "x", "{}", "[" * 10**5, '{"a":' * 10**5),
    *(f"[{','.join(GOOD)}]", f'{{"data": [{",".join(GOOD)}]}}', "".join(GOOD), TEXT[:-7]),
    *(TEXT.replace("\n", ",\n"), TEXT.replace('"', "'"), TEXT.replace("\n", "\r")),
    *(MORE + "{", MORE + "[]", MORE + '["a", "b"]', MORE + '{"answer": "#### 3"}', MORE + "\0"),
    *(MORE + GOOD[3].replace("### 3", "### 4"), "// a comment\n" + TEXT, "\xa0" + TEXT),
    *(TEXT.replace("question", "Question"), TEXT.replace("it", "\t"), TEXT.replace("it", "\\pi")),
    *(MORE + GOOD[3].replace("}", ', "answer": "#### 3"}'), MORE + '{"x": {"y": 1, "y": 2}}'),
    *("question,answer\nq,#### 1", "- question: q\n", "<!DOCTYPE html>", "\n".join(GOOD[:3])),
    *(MORE + GOOD[3].replace('"#### 3"', a.replace("'", '"')) for a in ANSWERS.split("|")),
    *(TEXT.encode(code) for code in ("utf-16", "utf-32")),
    *(MORE.encode() + b'{"question": "\xe9", "answer": "#### 3"}', gzip.compress(TEXT.encode())),
    *(b"PAR1\x15\0", b"\x80\x04\x95.", b"\x28\xb5\x2f\xfd", "version https://git-lfs.github.com/"),
]
REMEDY = (
    "mend |set |write |give |must |delete |takes |take |fetch |correct |name |save |unpack |run "
)


def is_a_sentence(message, path):
    return "\n" not in message and str(path) in message and re.search(REMEDY, message)


MISSING, FOLDER, LOOP = "a missing file", "a folder", "a symlink to itself"


def put(path, content):
    """Write bytes or text into a file, or put in its place what the content names."""
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    if content == FOLDER:
        path.mkdir()
    elif content == LOOP:
        path.symlink_to(path)
    elif content != MISSING:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.mark.parametrize("task", ["gsm8k", "math"])
def test_any_file_of_problems_is_read_right_or_refused_in_a_sentence(task, tmp_path):
    path = tmp_path / "some.jsonl"
    for content in [*RIGHT, *WRONG, MISSING, FOLDER, LOOP]:
        put(path, content)
        found = 0
        try:
            made = load_task(parse(["--task", task, "--data", str(path)]))
            golds = [final_answer(problem["answer"]) for problem in made.train + made.held_out]
            assert sorted(golds) == [*range(8)], content
            found = len(golds)
        except (ValueError, OSError) as error:
            assert is_a_sentence(str(error), path), error
        assert found == RIGHT.get(content, 0), content[:99]


# --- folders of models

IDS = torch.arange(24).view(2, 12)
NAME = "model.layers.1.mlp.up_proj.weight"
DAMAGES = [  # the whole file → what is in its place
    *(lambda whole, content=content: content for content in (MISSING, FOLDER, LOOP, POINTER)),
    *(lambda whole, content=content: content for content in ("", "[]", "7", "<!DOCTYPE html>")),
    lambda whole: whole[: len(whole) // 2],
    lambda whole: whole[:-2],
    lambda whole: whole + bytes(8),
    lambda whole: bytes(len(whole)),
    lambda whole: b"\xff\xfe" + whole,
    gzip.compress,
]
NEEDED = "model.safetensors", "config.json", "tokenizer.json"
OTHERS = "tokenizer_config.json", "generation_config.json", "chat_template.jinja"
ODD = [None, "x", "8", -1, 0, 1, 0.5, 1e30, math.nan, math.inf, [], [4], {}, {"a": 1}, True]
FLAGS = "--steps 0 --device cpu --quant bf16 --rank 4 --max-new-tokens 4 --eval-problems 2"


@pytest.fixture
def loads(tiny_chat, tmp_path, capsys, monkeypatch):
    """loads(damage, *arguments) copies tiny_chat and calls damage(copy, *arguments). train.py must
    load what transformers does, or refuse it in a sentence → whether it loads.
    """
    monkeypatch.setattr("tools.run.plot", lambda folders: tmp_path)  # it takes half a second
    folder = tmp_path / "model"

    def check(damage, *arguments):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tiny_chat, folder)
        damage(folder, *arguments)
        capsys.readouterr()
        with pytest.raises(SystemExit) as end, one_sentence("train.py"):
            flags = *FLAGS.split(), "--model", str(folder), "--out", f"{folder}/out"
            sys.exit(train.main(parse(flags)))
        if end.value.code:
            message = capsys.readouterr().err.strip()
            assert end.value.code == 2 and is_a_sentence(message, folder), message
            return False
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            ours = logits_of(decoder.load(weights.open(folder), "bf16", rank=2), IDS)
            assert (ours - theirs(IDS).logits).abs().max() < 1e-4
        return True

    return check


def damage_file(folder, file, damage):
    put(folder / file, damage((folder / file).read_bytes()))


@pytest.mark.parametrize("file", NEEDED + OTHERS)
def test_any_damaged_file_of_a_model(loads, file):
    found = [loads(damage_file, file, damage) for damage in DAMAGES]
    assert file in OTHERS or not any(found)


def edit(folder, file, changes):
    text = (folder / file).read_text()
    (folder / file).write_text(json.dumps(json.loads(text) | changes))


@pytest.mark.parametrize("seed", [0, slow(1)])
def test_any_odd_setting_of_a_model(loads, tiny_chat, seed):
    """In config.json, in its RoPE of any kind, and in generation_config.json."""
    rng = random.Random(seed)
    for _ in range(40):
        for file in ("config.json", "generation_config.json"):
            key = rng.choice([*json.loads((tiny_chat / file).read_text())])
            loads(edit, file, {key: rng.choice(ODD)})
        kind = rng.choice([*ROPE])
        rope = dict(rope_type=kind, rope_theta=1e4) | ROPE[kind]
        rope[rng.choice([*rope])] = rng.choice(ODD)
        loads(edit, "config.json", {"rope_parameters": rope})


def change(folder, tensors):
    file = folder / "model.safetensors"
    tensors = load_file(file) | tensors
    save_file({k: t for k, t in tensors.items() if t is not None}, file, {"format": "pt"})


def test_any_odd_tensor_of_a_model(loads, tiny_chat):
    whole = load_file(tiny_chat / "model.safetensors")
    one = whole[NAME]
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        assert loads(change, {name: tensor.to(dtype) for name, tensor in whole.items()})
    for odd in (
        *(one.to(dtype) for dtype in (torch.int8, torch.bool, torch.complex64, torch.float8_e5m2)),
        *(one.T.contiguous(), one[1:].clone(), one[None], one.flatten(), torch.tensor(1.0), None),
        *(one * math.nan, one / 0, one.double() * 1e300, torch.zeros(0)),
    ):
        assert not loads(change, {NAME: odd})
    for name in (NAME.replace("weight", "bias"), NAME.replace("1", "2"), f"model.{NAME}"):
        assert not loads(change, {name: one.clone()})


def shard(folder, damage, index):
    """Cut a model into two files and an index. Damage the second file; index(listed) is written."""
    whole = load_file(folder / "model.safetensors")
    names = sorted(whole)
    files = {"1.safetensors": names[:9], "2.safetensors": names[9:]}
    for file, inside in files.items():
        save_file({name: whole[name] for name in inside}, folder / file, {"format": "pt"})
    listed = {name: file for file, inside in files.items() for name in inside}
    put(folder / "model.safetensors", MISSING)
    damage_file(folder, "2.safetensors", damage)
    put(folder / "model.safetensors.index.json", index(listed))


def written(weight_map):
    return json.dumps({"metadata": {}, "weight_map": weight_map})


def test_any_damaged_part_of_a_model_of_several_files(loads):
    assert loads(shard, bytes, written)
    for damage in DAMAGES:
        assert not loads(shard, damage, written)
        loads(shard, bytes, lambda listed, damage=damage: damage(written(listed).encode()))
    for odd in (*ODD, {"x": "1.safetensors"}):
        assert not loads(shard, bytes, lambda listed, odd=odd: written(odd))
        assert not loads(shard, bytes, lambda listed, odd=odd: written(dict.fromkeys(listed, odd)))
