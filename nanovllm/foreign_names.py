"""The names that users bring from vLLM, transformers and other engines, and the remedy for each.

There is a table for each place where a name may be given. The error for an unknown name that is not
in the table names the nearest known name, or all known names.
"""

from typing import Any, NamedTuple


class Foreign(NamedTuple):
    """A name of another engine that this library does not have.

    remedy: What to do instead.
    harmless: Values that ask for nothing, or for what is done anyway. They are ignored; any other
        value is refused with the remedy.
    same_as: The name of an option of this library whose value is harmless too.
    means: A value, and the name and value here for which that value stands.
    """

    remedy: str
    harmless: tuple[Any, ...] = (None,)
    same_as: str = ""
    means: tuple[Any, str, Any] | None = None


NO_LORA = Foreign("merge the adapter into the weights", (None, False))
NO_BEAMS = Foreign("there is no beam search, use n with a temperature", (None, False, 1.0, 1))
ONLY_TEXT = Foreign("leave it out, only text goes in", (None, {}))
TEMPLATE = "give it in chat_template_kwargs"
ONE_HOST = Foreign(
    "leave it out, ranks are processes of one host: use tensor_parallel_size, or an LLM in each "
    "of several processes, with device='cuda:N'",
    (None, 1, False, "mp", "uni"),
)

# For the options of LLM: names of vLLM, SGLang, transformers' from_pretrained and others.
OPTIONS = {
    **dict.fromkeys(("enable_lora", "max_loras", "max_lora_rank"), NO_LORA),
    **dict.fromkeys(("pipeline_parallel_size", "data_parallel_size"), ONE_HOST),
    **dict.fromkeys(("distributed_executor_backend", "enable_expert_parallel"), ONE_HOST),
    **dict.fromkeys(
        ("quantization_config", "load_in_4bit", "load_in_8bit"),
        Foreign(
            "leave it out, config.json names the format of a quantised checkpoint; "
            "quantization='fp8' quantises another one",
            (None, False),
        ),
    ),
    **dict.fromkeys(
        ("speculative_config", "speculative_model", "num_speculative_tokens"),
        Foreign("leave it out, there is no speculative decoding"),
    ),
    **dict.fromkeys(
        ("max_batch_size", "batch_size", "max_running_requests"),
        Foreign(
            "use max_num_seqs, the most sequences that run at the same time",
            same_as="max_num_seqs",
        ),
    ),
    **dict.fromkeys(
        ("context_length", "n_ctx"), Foreign("use max_model_len", same_as="max_model_len")
    ),
    **dict.fromkeys(
        ("num_gpus", "tp_size"),
        Foreign("use tensor_parallel_size", (None, 1), same_as="tensor_parallel_size"),
    ),
    **dict.fromkeys(("token", "hf_token"), Foreign("set the variable HF_TOKEN", (None, False))),
    **dict.fromkeys(("download_dir", "cache_dir"), Foreign("set the variable HF_HOME")),
    **dict.fromkeys(
        ("revision", "tokenizer_revision"),
        Foreign("download that revision, and give its folder", (None, "main")),
    ),
    **dict.fromkeys(
        ("hf_overrides", "rope_scaling"),
        Foreign("change config.json, in a copy of the folder", (None, {})),
    ),
    **dict.fromkeys(
        ("task", "runner"), Foreign("leave it out, an LLM generates", (None, "auto", "generate"))
    ),
    "attn_implementation": Foreign("use attention_backend"),
    "block_size": Foreign("use kvcache_block_size, a multiple of 16"),
    "calculate_kv_scales": Foreign(
        "leave it out, kv_cache_dtype='fp8' takes the checkpoint's scales, or 1", (None, False)
    ),
    "compilation_config": Foreign("use kernels='compile', or enforce_eager for no CUDA graphs"),
    "cpu_offload_gb": Foreign("leave it out, weights stay where they are", (None, 0, 0.0)),
    "device_map": Foreign("use device, or tensor_parallel_size for several GPUs"),
    "disable_custom_all_reduce": Foreign(
        "use symmetric_memory=False", (None, False), means=(True, "symmetric_memory", False)
    ),
    "disable_log_stats": Foreign("use metrics or on_step", (None, True)),
    "enable_chunked_prefill": Foreign("use max_num_batched_tokens, always in chunks", (None, True)),
    "enable_sleep_mode": Foreign("leave it out, sleep needs no option", (None, True, False)),
    "generation_config": Foreign("give what you want of it in SamplingParams", (None, "vllm")),
    "guided_decoding_backend": Foreign("leave it out, there is one backend", (None, "auto")),
    "limit_mm_per_prompt": ONLY_TEXT,
    "max_seq_len_to_capture": Foreign(
        "leave it out, graphs serve sequences of any length", (None, 8192), same_as="max_model_len"
    ),
    "mem_fraction_static": Foreign("use gpu_memory_utilization"),
    "num_gpu_blocks_override": Foreign("use num_kvcache_blocks"),
    "served_model_name": Foreign("leave it out, nothing is served over HTTP", same_as="model"),
    "swap_space": Foreign(
        "leave it out, preempted requests are computed anew", (None, 0, 0.0, 4, 4.0)
    ),
    "tokenizer": Foreign(
        "leave it out if it is the model's, or put its files into the model's folder",
        same_as="model",
    ),
    "tokenizer_mode": Foreign("leave it out, it is read as transformers does", (None, "auto")),
    "torch_dtype": Foreign("use dtype", same_as="dtype"),
    "trust_remote_code": Foreign(
        "leave it out, no code of a model folder is ever run", (None, True, False)
    ),
}

FORMS = ("json", "json_object", "regex", "choice", "grammar")
GUIDED = {  # vLLM's names before structured_outputs
    f"guided_{form}": Foreign(f"use structured_outputs={{{form!r}: ...}}") for form in FORMS
} | {"guided_whitespace_pattern": Foreign("use structured_outputs' whitespace_pattern")}
OF_TRANSFORMERS = {  # parameters of transformers' generate
    "do_sample": Foreign("use temperature, which is 0 for the likeliest token", (None, True)),
    "eos_token_id": Foreign("use stop_token_ids"),
    "logits_processor": Foreign("use logits_processors"),
    "max_length": Foreign("use max_tokens, which counts the output alone"),
    "max_new_tokens": Foreign("use max_tokens", same_as="max_tokens"),
    "min_new_tokens": Foreign("use min_tokens", (None, 0), same_as="min_tokens"),
    "num_beams": NO_BEAMS,
    "num_return_sequences": Foreign("use n", (None, 1), same_as="n"),
    "pad_token_id": Foreign("leave it out, nothing is padded"),
    "stop_strings": Foreign("use stop", same_as="stop"),
    "streamer": Foreign("use stream"),
}
PARAMETERS = {  # for SamplingParams
    **OF_TRANSFORMERS,
    **GUIDED,
    **{form: GUIDED[f"guided_{form}"] for form in FORMS},
    "best_of": Foreign("use n, and choose by cumulative_logprob", (None, 1), same_as="n"),
    "detokenize": Foreign("leave it out, and read token_ids", (None, True)),
    "extra_args": Foreign("leave it out, nothing reads it", (None, {})),
    "guided_decoding": Foreign("use structured_outputs"),
    "json_schema": Foreign("use structured_outputs={'json': ...}"),
    "max_completion_tokens": Foreign("use max_tokens", same_as="max_tokens"),
    "output_kind": Foreign("leave it out: generate returns all at the end, stream what is new"),
    "response_format": Foreign("use structured_outputs={'json': ...}", (None, {"type": "text"})),
    "truncate_prompt_tokens": Foreign("shorten what encode returns, and give these token ids"),
    "use_beam_search": NO_BEAMS,
}
IN_LINE = {**PARAMETERS, "tools": Foreign(TEMPLATE, (None, []))}  # for a line of a job's input
IN_FORM = {  # for StructuredOutputsParams
    "backend": Foreign("leave it out, there is one backend", (None, "auto")),
    "structural_tag": Foreign("write a grammar of the text with its tags"),
}
IN_CALL = {
    **{
        name: Foreign(f"in SamplingParams, {foreign.remedy}", ())
        for name, foreign in (OF_TRANSFORMERS | GUIDED).items()
    },
    "lora_request": NO_LORA,
}
IN_GENERATE = {
    **IN_CALL,
    "priority": Foreign("give a SamplingParams with its priority for each prompt"),
    "prompt_token_ids": Foreign("give them as prompts"),
    "tokenization_kwargs": Foreign("give the token ids that get_tokenizer() makes", (None, {})),
}
IN_CHAT = {
    **IN_CALL,
    "add_generation_prompt": Foreign(TEMPLATE, (None, True)),
    "chat_template": Foreign(TEMPLATE),
    "continue_final_message": Foreign(
        f"{TEMPLATE}, with add_generation_prompt=False", (None, False)
    ),
    "tools": Foreign(TEMPLATE),
}
IN_WAKE_UP = {"tags": Foreign("leave it out, the weights and the KV cache come back together")}
IN_PROMPT = {  # for a prompt that is a dict
    "cache_salt": Foreign("leave it out, or make the LLM with enable_prefix_caching=False"),
    "multi_modal_data": ONLY_TEXT,
    "prompt_embeds": Foreign("give 'prompt_token_ids'"),
    "role": Foreign("a conversation goes to chat or stream_chat"),
}
# Attributes that scripts for vLLM read, and what to read here instead.
OF_LLM = {
    "get_default_sampling_params": "use SamplingParams(), generation_config.json is not read",
    "get_metrics": "use metrics()",
    "llm_engine": "use max_model_len, get_tokenizer(), or add_request and step; engine is what "
    "runs the requests here",
    "start_profile": "use LLM(trace=...)",
}
OF_OUTPUT = {"metrics": "use llm.metrics(), or llm.on_step for the time of each step"}
