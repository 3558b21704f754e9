"""What the tests share: seeds, poisoned memory, tiny checkpoints, Triton kernels without a GPU."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: tiny models lose by threads
import torch  # noqa: E402

# a shell starts background jobs with it ignored
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup starts its command with it ignored
sys.orig_argv = ["python", "train.py"]  # the program that a run names and remembers


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill what torch.empty returns with NaN, so that code that reads unwritten memory fails."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # makes empty() fill its result
    yield
    torch.use_deterministic_algorithms(False)


TINY = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    eos_token_id=2,
    pad_token_id=2,
    bos_token_id=1,
)

SHORT = {"original_max_position_embeddings": 32}
ROPE = {  # kind of RoPE → its parameters, for a tiny checkpoint
    "default": {},
    "linear": {"factor": 2.0},
    "yarn": {"factor": 4.0} | SHORT,
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | SHORT,
}


def logits_of(model, ids):
    """→ (B, T, V) our decoder's logits of the rows ids (B, T), independent texts."""
    from ops import attention

    B, T = ids.shape
    attend = attention.Packed([(T, [])] * B, ids.device)
    hidden = model(ids.flatten(), attend.positions, attend)
    return model.logits(hidden).view(B, T, -1)


def tiny_checkpoint(folder, family="llama", **changes):
    """Save a random transformers model of a family into `folder` → that model in fp32, as the
    oracle.
    """
    import transformers

    name = family.capitalize()
    config = getattr(transformers, f"{name}Config")(**(TINY | changes))
    torch.manual_seed(1)
    oracle = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, p in oracle.named_parameters():  # norms of 1 would hide errors
            p.normal_(1.0 if "norm" in parameter_name else 0.0, 0.2)
    oracle.save_pretrained(folder)
    return oracle


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """→ the folder of a tiny random Llama."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_checkpoint(folder)
    return folder


@pytest.fixture(scope="session")
def smollm2():
    """→ the default model's checkpoint and tokenizer, once a session: parsing it takes seconds."""
    from tools import weights

    source = weights.open("smollm2")
    return source, source.tokenizer()


@pytest.fixture(scope="session")
def tiny_chat(tmp_path_factory):
    """→ the folder of a tiny random Llama that train.py can train: it has a tokenizer of one token
    per character, a chat template (start, message, "=") and an end token that is also the
    padding.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny_chat")
    tiny_checkpoint(folder, vocab_size=32, num_hidden_layers=2)
    vocab = {
        token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *"0123456789 *+-=?.,Whatis"])
    }
    characters = Tokenizer(
        models.WordLevel(vocab | {f"<{i}>": i for i in range(len(vocab), 32)}, "<unk>")
    )
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
    )
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}={% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return folder


# --- runs of train.py


@pytest.fixture(autouse=True)
def handlers():
    """main() installs signal handlers; restore pytest's for the next test."""
    old = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in old.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def whole(tiny_chat, tmp_path_factory):
    """The folder of a whole run of command.FLAGS, which tests read or copy and never change."""
    import command

    out = tmp_path_factory.mktemp("runs")
    assert command.main(*command.FLAGS, "--model", tiny_chat, "--out", out / "whole") == 0
    return out / "whole"


@pytest.fixture
def start(tiny_chat, tmp_path):
    """start(more flags) runs the same in tmp_path/run → the exit code."""
    import command

    return lambda *more: command.main(
        *command.FLAGS, "--model", tiny_chat, "--out", tmp_path / "run", *more
    )


# --- Triton kernels without a GPU: this process compiles them, a child interprets them


def as_a_test(function):
    """Call a function in the child, with the seed and the poisoned memory that a test has."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    function()


@pytest.fixture(scope="session")
def interpret():
    """interpret(function) calls a function of a test module in the one child that interprets
    kernels.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            pool.submit(os.getpid).result()  # starts the child
        yield lambda function: pool.submit(as_a_test, function).result()


# compute capability → bytes of shared memory that a CTA may use
SHARED = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
# every day one kernel of each kind for Hopper; with -m slow every specialisation for every
# generation
each_generation = pytest.mark.parametrize(
    "cc, everything",
    [(90, False), *(pytest.param(cc, True, marks=pytest.mark.slow) for cc in SHARED)],
)


def build(kernel, cc, constants, names_of, aligned, warps=4, stages=3, registers=255, stack=0):
    """Compile a kernel → its PTX and its cubin. AssertionError: it spills more than `stack` bytes,
    or needs more than `registers` or SHARED[cc].

    names_of: type → the arguments of that type; others are i32. aligned: integers that 16 divides.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {name: kind for kind, names in names_of.items() for name in names.split()}
    signature = {
        n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names
    }
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(kernel.arg_names)
        if signature[n][0] == "*" or n in aligned
    }
    made = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs),
        target=GPUTarget("cuda", cc, 32),
        options=dict(num_warps=warps, num_stages=stages, launch_pdl=cc >= 90),
    )
    usage = cuobjdump("-res-usage", made.asm["cubin"])
    used = {key: int(n) for key, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    fits = used["STACK"] <= stack and used["LOCAL"] == 0 and used["REG"] <= registers
    used["SHARED"] = made.metadata.shared
    assert fits and used["SHARED"] <= SHARED[cc], f"{cc} {kernel} {constants} {used}"
    return made.asm["ptx"], made.asm["cubin"]


def cuobjdump(flag, cubin):
    import triton

    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [program, flag, file.name], capture_output=True, text=True, check=True
        ).stdout


def compile_with_a_wait(cc, jobs, names_of, aligned):
    """Compile kernels and check that each waits once for its predecessor (PDL). jobs: (kernel,
    constants, warps, most registers = 65536 / 32 / warps / CTAs on an SM); the rest as in build.
    """
    for kernel, constants, warps, registers in jobs:
        ptx, _ = build(
            kernel, cc, constants | dict(PDL=cc >= 90), names_of, aligned, warps, 1, registers
        )
        waits = ptx.count("griddepcontrol.wait")
        assert waits == (cc >= 90), f"{kernel}: one that does not wait lets the next overtake"
