"""Train the tiny Qwen3 that travels with the package: a code model of the Python standard library.

    python train_tiny_qwen3.py --out tiny-qwen3          # reads this interpreter's own Lib/; two minutes on a GPU

Four stages, in order: collect the source files, train a byte-level BPE on them, train the model, and show what it
writes. The model's definition is Qwen3ForCausalLM of `transformers`; nothing here is imported by the rest of nanovllm.
"""

import argparse
import ast
import contextlib
import hashlib
import json
import math
import re
import sysconfig
import time
import tokenize
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

EOS = "<|endoftext|>"

# A prompt may end anywhere, so no token may span a place where people stop typing: line breaks, indentation and words
# are separate pieces. A run of spaces is one piece, which lets BPE give each depth of indentation its own token.
PIECES = r"\n+| {2,}| ?__[a-z]+__| ?_*\p{L}+| ?\d{1,3}| ?_+| ?[^\s\p{L}\d_]+|\s"

SKIPPED_FOLDERS = {"site-packages", "__pycache__", "pydoc_data", "encodings", "encoded_modules"}
LIBRARY_WEIGHT = 2      # the library is read twice as often, per token, as its test suite
WARMUP = 200            # steps

MODEL = dict(           # 3.8 M parameters
    vocab_size=4096, hidden_size=256, intermediate_size=640, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=2048, rms_norm_eps=1e-6,
    tie_word_embeddings=True, attention_bias=False, attention_dropout=0.0, hidden_act="silu", initializer_range=0.02,
    use_cache=True, use_sliding_window=False, sliding_window=None, max_window_layers=4, bos_token_id=None)
ROPE_THETA = 10_000.0   # apart, because transformers 4 and 5 spell it differently

# A conversation as comments: the model writes code after it, and takes in little of what it says.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}# assistant:\n\n{{ message.content }}\n\n"
    "{% else %}# {{ message.role }}: {{ message.content | replace('\\n', '\\n# ') }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}# assistant:\n\n{% endif %}")

PROMPTS = [
    "def read_lines(path):", "class Stack:\n    def push(self, item):", "def main():", "import os\nimport sys\n",
    "def parse_header(line):\n    \"\"\"", "class TestQueue(unittest.TestCase):", "class Error(Exception):",
    "def _copy_file(src, dst):", "async def connect(host, port):", "def is_prime(n):"]


def shorten_docstrings(text):
    """Keep the first line of each docstring: a model this small learns code, and only mumbles in prose."""
    lines = text.split("\n")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            first, last = node.lineno - 1, node.end_lineno
            opening = re.match(r"""(\s*[rRuU]?(\"{3}|'{3}))(.*)""", lines[first])
            if opening and last > first + 1:
                inside = [opening[3].strip()] + [line.strip() for line in lines[first + 1 : last]]
                summary = next(filter(None, inside)).removesuffix(opening[2]).rstrip("\\")
                lines[first:last] = [opening[1] + summary + opening[2]] + [None] * (last - first - 1)
    return "\n".join(line for line in lines if line is not None)


def read_source(path):
    """Return the text of a file, or None where it does not parse, or is a table, not code."""
    try:
        with tokenize.open(path) as file:
            text = shorten_docstrings(re.sub(r"[ \t\f]+\n", "\n", file.read()).strip("\n") + "\n")
        ast.parse(text)
    except (SyntaxError, UnicodeDecodeError, ValueError, RecursionError):
        return None
    table = sum(map(str.isdigit, text)) > 0.25 * sum(map(str.isalpha, text))
    foreign = len(text.encode()) > 1.02 * len(text)
    return None if table or foreign or "\n\t" in text or not 200 <= len(text) <= 350_000 else text


def collect(root):
    """[(path relative to root, text)] in a fixed order, without duplicates."""
    texts = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not SKIPPED_FOLDERS & set(name.parts) and (text := read_source(path)) is not None:
            texts.setdefault(text, name.as_posix())
    return [(name, text) for text, name in texts.items()]


def definitions(text):
    """Character offsets of the lines that open a top-level function or class (its first decorator, if any)."""
    line_starts = [0] + [match.end() for match in re.finditer("\n", text)]
    nodes = [node for node in ast.parse(text).body if hasattr(node, "decorator_list")]
    return {line_starts[min([node.lineno] + [d.lineno for d in node.decorator_list]) - 1] for node in nodes}


def train_tokenizer(texts):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=MODEL["vocab_size"], special_tokens=[EOS], show_progress=False, initial_alphabet=alphabet))
    if tokenizer.get_vocab_size() != MODEL["vocab_size"]:
        raise ValueError(f"--corpus yields {tokenizer.get_vocab_size()} tokens, too few: name a larger folder of code")
    return tokenizer


def tokenize_corpus(tokenizer, documents):
    """-> one stream of tokens [N], documents as rows (first, end, weight), definitions as rows (position, weight)."""
    tokens, spans, openings = [], [], []
    for (name, text), encoding in zip(documents, tokenizer.encode_batch([text for _, text in documents])):
        weight = 1 if "test" in name else LIBRARY_WEIGHT
        wanted, base = definitions(text), len(tokens)
        openings += [(base + i, weight) for i, (start, _) in enumerate(encoding.offsets) if start in wanted]
        tokens += encoding.ids + [tokenizer.token_to_id(EOS)]
        spans.append((base, len(tokens), weight))
    return torch.tensor(tokens), torch.tensor(spans), torch.tensor(openings)


def draw_starts(spans, openings, batch, generator):
    """Half of the windows open at a top-level definition, as prompts do; half open anywhere. -> [batch]"""
    first, end, weight = spans.unbind(1)
    document = torch.multinomial(weight * (end - first).double(), batch // 2, True, generator=generator)
    inside = torch.rand(batch // 2, generator=generator, dtype=torch.double) * (end - first)[document]
    opening = torch.multinomial(openings[:, 1].double(), batch - batch // 2, True, generator=generator)
    return torch.cat([first[document] + inside.long(), openings[opening, 0]])


def loss_of(model, window):     # window [batch, context + 1]
    # The dict stands for a mask already made: none, so that attention takes its causal fast path, also when compiled.
    logits = model(window[:, :-1], attention_mask={"full_attention": None}, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model, tokens, context):
    windows = tokens[: (len(tokens) - 1) // context * context + 1].unfold(0, context + 1, context)
    losses = [loss_of(model, part) * len(part) for part in windows.split(64)]
    return (sum(losses) / len(windows)).item()


def train(model, stream, held_out, args, device):
    tokens, spans, openings = stream
    groups = [{"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": args.weight_decay},
              {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=device == "cuda")
    step_loss = torch.compile(loss_of) if device == "cuda" else loss_of
    generator = torch.Generator().manual_seed(args.seed)
    last_start = len(tokens) - args.context - 1
    tokens, held_out, offsets = tokens.to(device), held_out.to(device), torch.arange(args.context + 1, device=device)
    began, total = time.monotonic(), torch.zeros((), device=device)
    for step in range(1, args.steps + 1):
        decayed = max(0, step - WARMUP) / max(1, args.steps - WARMUP)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, step / WARMUP) * 0.5 * (1 + math.cos(math.pi * decayed))
        first = draw_starts(spans, openings, args.batch, generator).clamp(max=last_start).to(device)
        with torch.autocast(device, torch.bfloat16):
            loss = step_loss(model, tokens[first[:, None] + offsets])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total += loss.detach()
        if step % args.report == 0:
            with torch.autocast(device, torch.bfloat16):
                held = held_out_loss(model, held_out, args.context)
            print(f"{step}: {step * args.batch * args.context / 1e6:.0f} M tokens  {time.monotonic() - began:.0f} s  "
                  f"train {total.item() / args.report:.3f}  held out {held:.3f}", flush=True)
            total.zero_()


def save(model, tokenizer, out):
    """Write the folder by hand, in the spelling that transformers 4.51 and 5 both read."""
    eos = tokenizer.token_to_id(EOS)
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16", **MODEL,
              "rope_theta": ROPE_THETA, "rope_scaling": None, "eos_token_id": eos}
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "pad_token": EOS,
                        "model_max_length": MODEL["max_position_embeddings"], "clean_up_tokenization_spaces": False,
                        "chat_template": CHAT_TEMPLATE}
    generation_config = {"do_sample": False, "eos_token_id": eos, "pad_token_id": eos}
    out.mkdir(parents=True, exist_ok=True)
    for name in "config", "tokenizer_config", "generation_config":
        (out / f"{name}.json").write_text(json.dumps(locals()[name], indent=2) + "\n")
    tokenizer.save(str(out / "tokenizer.json"))
    weights = {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in model.state_dict().items()}
    del weights["lm_head.weight"]       # tied to the embedding
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})


def parses(text):
    """Tell whether a text is Python, but for at most five lines at its end, where it was cut off."""
    lines = text.split("\n")[:-1]
    for kept in range(len(lines), max(0, len(lines) - 5), -1):
        with contextlib.suppress(SyntaxError):
            ast.parse("\n".join(lines[:kept]))
            return True
    return False


def show_samples(folder, held_out, device):
    """Greedy continuations by the saved model, as anyone would load it: of PROMPTS, then of 64 held-out definitions."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    lines = [line for _, text in held_out for at in sorted(definitions(text))
             if (line := text[at:].split("\n", 1)[0]).endswith(":")]
    for prompts in PROMPTS, lines[:: max(1, len(lines) // 64)][:64]:
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left",
                           return_token_type_ids=False).to(device)
        output = model.generate(**inputs, max_new_tokens=128, do_sample=False)
        texts = tokenizer.batch_decode(output, skip_special_tokens=True)
        if prompts is PROMPTS:
            print(("\n" + "-" * 80 + "\n").join(["", *texts, ""]))
        print(f"{sum(map(parses, texts))} of {len(texts)} continuations parse", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--corpus", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="folder of Python sources")
    add("--out", type=Path, default=Path(__file__).parent / "tiny-qwen3", help="folder to write")
    add("--steps", type=int, default=4500, help="optimizer steps")
    add("--batch", type=int, default=64, help="windows a step")
    add("--context", type=int, default=1024, help="tokens a window")
    add("--lr", type=float, default=3e-3, help="peak learning rate")
    add("--weight-decay", type=float, default=1.0, help="of the matrices: high, as every file is read dozens of times")
    add("--seed", type=int, default=0, help="of the weights and of the order of the data")
    add("--report", type=int, default=500, help="steps between reports of the losses")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    learned, held_out = [], []
    for name, text in collect(args.corpus):     # hold out about one file in forty, by its name alone
        (learned if hashlib.sha256(name.encode()).digest()[0] % 40 else held_out).append((name, text))
    tokenizer = train_tokenizer([text for _, text in learned])
    stream = tokenize_corpus(tokenizer, learned)
    held_out_tokens = tokenize_corpus(tokenizer, held_out)[0]
    print(f"{len(learned)} files, {len(stream[0]) / 1e6:.2f} M tokens, {len(stream[2])} top-level definitions; "
          f"held out {len(held_out)} files, {len(held_out_tokens)} tokens", flush=True)

    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    rope = {"rope_type": "default", "rope_theta": ROPE_THETA}
    model = Qwen3ForCausalLM(Qwen3Config(**MODEL, rope_parameters=rope, attn_implementation="sdpa")).to(device)
    train(model, stream, held_out_tokens, args, device)
    save(model, tokenizer, args.out)
    show_samples(args.out, held_out, device)


if __name__ == "__main__":
    main()
