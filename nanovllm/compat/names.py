"""Names of vLLM that are none here, and what to do instead; of transformers and of other engines,
too.

vLLM's documentation of releases up to 0.31 has them, and scripts of older ones. A value that asks
for nothing, or for what is done anyway, may stay: None, and what stands after a remedy. Any other
is refused, with the remedy. DEFAULTS has values that mean the default there, of names that are
here.
"""

from dataclasses import fields

from nanovllm.checks import Foreign
from nanovllm.sampling_params import SamplingParams
from nanovllm.structured_outputs import KINDS

ONLY_TEXT = Foreign(
    "leave it out, only text goes in", (None, {}, False, 0, {"image": 0}, {"image": 0, "video": 0})
)
ONLY_GENERATES = Foreign("leave it out, an LLM generates and does nothing else", (None, "auto"))
NO_LORA = Foreign("merge the adapter into the weights", (None, False))
NO_BEAMS = Foreign("there is no beam search, use n with a temperature", (None, False, 1.0, 1))
NOT_SPECULATIVE = Foreign("leave it out, there is no speculative decoding")
ONE_HOST = Foreign(
    "leave it out, ranks are processes of one host: use tensor_parallel_size, or an LLM in each "
    "of several processes, with device='cuda:N'",
    (None, 1, False, "mp", "uni", "auto", ""),
)
CONFIG_FILE = Foreign("change config.json, in a copy of the folder", (None, {}))
REVISION = Foreign("download that revision, and give its folder", (None, "main"))
COMPILATION = Foreign("use kernels='compile' for torch.compile's, enforce_eager for no graphs")
ALL_LENGTHS = Foreign(
    "leave it out, graphs serve sequences of any length", (None, 8192), same_as="max_model_len"
)
IN_CHUNKS = Foreign("use max_num_batched_tokens, prompts come in chunks", (None, 1, 0, 0.0))
OBSERVED = Foreign("use metrics, on_step or trace", (None, False))
KV_STAYS = Foreign("leave it out, KV stays in its LLM", (None, False))
QUANTISED = Foreign("give a checkpoint that is not quantised")
SERVED = Foreign("leave it out, nothing is served over HTTP", (None, "", False), same_as="model")
SAMPLING_FILE = Foreign("give SamplingParams what you want of generation_config.json", (None, {}))
STRUCTURED = Foreign("leave it out, SamplingParams says what is wanted", (None, "auto"))
IN_TEMPLATE = "give it in chat_template_kwargs"

OPTIONS = {
    "additional_config": ONLY_GENERATES,
    "all2all_backend": ONE_HOST,
    "allowed_local_media_path": Foreign(ONLY_TEXT.remedy, (None, "")),
    "allowed_media_domains": ONLY_TEXT,
    "async_scheduling": Foreign("use overlap"),
    "attention_config": Foreign("use attention_backend"),
    "block_size": Foreign("use kvcache_block_size, a multiple of 16"),
    "calculate_kv_scales": Foreign("leave it out, KV is stored in dtype", (None, False)),
    "chat_template": Foreign("give chat chat_template_kwargs={'chat_template': ...}"),
    "code_revision": REVISION,
    "collect_detailed_traces": OBSERVED,
    "compilation_config": COMPILATION,
    "config_format": Foreign("give a folder in Hugging Face's form", (None, "auto", "hf")),
    "convert": Foreign(ONLY_GENERATES.remedy, (None, "auto", "none")),
    "cpu_offload_gb": Foreign(
        "use tensor_parallel_size, weights stay where they are", (None, 0, 0.0)
    ),
    "cuda_graph_sizes": COMPILATION,
    "cudagraph_capture_sizes": COMPILATION,
    "data_parallel_address": ONE_HOST,
    "data_parallel_backend": ONE_HOST,
    "data_parallel_rank": ONE_HOST,
    "data_parallel_size": ONE_HOST,
    "data_parallel_size_local": ONE_HOST,
    "decode_context_parallel_size": ONE_HOST,
    "disable_async_output_proc": Foreign("use overlap=False", (None, False)),
    "disable_cascade_attn": Foreign("leave it out, attention chooses", (None, False)),
    "disable_chunked_mm_input": ONLY_TEXT,
    "disable_custom_all_reduce": Foreign("use symmetric_memory=False", (None, False)),
    "disable_hybrid_kv_cache_manager": Foreign(
        "leave it out, there is one kind of blocks", (None, True, False)
    ),
    "disable_log_requests": Foreign("use on_step or trace", (None, True)),
    "disable_log_stats": Foreign("use metrics or on_step", (None, True)),
    "disable_sliding_window": Foreign("leave it out, windows are the model's", (None, False)),
    "distributed_executor_backend": ONE_HOST,
    "download_dir": Foreign("set the variable HF_HOME"),
    "ec_transfer_config": KV_STAYS,
    "enable_chunked_prefill": Foreign(
        "leave it out, prompts longer than max_num_batched_tokens are computed in chunks",
        (None, True),
    ),
    "enable_dbo": ONE_HOST,
    "enable_eplb": ONE_HOST,
    "enable_expert_parallel": ONE_HOST,
    "enable_log_requests": OBSERVED,
    "enable_lora": NO_LORA,
    "enable_mm_embeds": ONLY_TEXT,
    "enable_prompt_adapter": NO_LORA,
    "enable_prompt_embeds": Foreign("give token ids", (None, False)),
    "enable_return_routed_experts": Foreign(
        "leave it out, which experts run is not told", (None, False)
    ),
    "enable_sleep_mode": Foreign("leave it out, sleep needs no option", (None, True, False)),
    "fully_sharded_loras": NO_LORA,
    "generation_config": Foreign(SAMPLING_FILE.remedy, (None, "vllm")),
    "guided_decoding_backend": STRUCTURED,
    "hf_config_path": CONFIG_FILE,
    "hf_overrides": CONFIG_FILE,
    "hf_token": Foreign("set the variable HF_TOKEN", (None, False)),
    "ignore_patterns": Foreign("download what you want, and give its folder"),
    "interleave_mm_strings": ONLY_TEXT,
    "kv_cache_dtype": Foreign("leave it out, KV is stored in dtype", (None, "auto")),
    "kv_cache_memory_bytes": Foreign("use num_kvcache_blocks or gpu_memory_utilization"),
    "kv_events_config": KV_STAYS,
    "kv_offloading_backend": KV_STAYS,
    "kv_offloading_size": KV_STAYS,
    "kv_sharing_fast_prefill": KV_STAYS,
    "kv_transfer_config": KV_STAYS,
    "language_model_only": Foreign(ONLY_TEXT.remedy, (None, True, False)),
    "limit_mm_per_prompt": ONLY_TEXT,
    "logits_processors": Foreign("give SamplingParams(logits_processors=...)", (None, [])),
    "logprobs_mode": Foreign(
        "leave it out, they are of the model's own logits", (None, "raw_logprobs")
    ),
    "long_lora_scaling_factors": NO_LORA,
    "long_prefill_token_threshold": IN_CHUNKS,
    "lora_dtype": Foreign(NO_LORA.remedy, (None, "auto")),
    "master_addr": ONE_HOST,
    "max_context_len_to_capture": ALL_LENGTHS,
    "max_cpu_loras": NO_LORA,
    "max_cudagraph_capture_size": COMPILATION,
    "max_logprobs": Foreign("leave it out, SamplingParams takes up to 20", (None, 20)),
    "max_long_partial_prefills": IN_CHUNKS,
    "max_lora_rank": NO_LORA,
    "max_loras": NO_LORA,
    "max_num_partial_prefills": IN_CHUNKS,
    "max_parallel_loading_workers": ONE_HOST,
    "max_prompt_adapters": NO_LORA,
    "max_seq_len_to_capture": ALL_LENGTHS,
    "mm_processor_cache_gb": Foreign(ONLY_TEXT.remedy, (None, 0, 4)),
    "mm_processor_kwargs": ONLY_TEXT,
    "model_impl": Foreign("leave it out, models are this library's", (None, "auto", "vllm")),
    "model_loader_extra_config": Foreign("leave it out, safetensors are read", (None, {})),
    "multi_step_stream_outputs": Foreign("leave it out, stream brings each token", (None, True)),
    "nnodes": ONE_HOST,
    "num_gpu_blocks_override": Foreign("use num_kvcache_blocks"),
    "num_lookahead_slots": Foreign(NOT_SPECULATIVE.remedy, (None, 0)),
    "num_scheduler_steps": Foreign("use overlap", (None, 1)),
    "num_speculative_tokens": NOT_SPECULATIVE,
    "offload_group_size": Foreign(
        "use tensor_parallel_size, weights stay where they are", (None, 0)
    ),
    "optimization_level": COMPILATION,
    "otlp_traces_endpoint": OBSERVED,
    "override_attention_dtype": Foreign("leave it out, attention computes in dtype"),
    "override_generation_config": SAMPLING_FILE,
    "override_pooler_config": ONLY_GENERATES,
    "pipeline_parallel_size": ONE_HOST,
    "pooler_config": ONLY_GENERATES,
    "preemption_mode": Foreign(
        "leave it out, preempted requests are computed anew", (None, "recompute")
    ),
    "prefill_context_parallel_size": ONE_HOST,
    "prefix_caching_hash_algo": Foreign(
        "leave it out, prefixes are compared in full", (None, "builtin", "sha256")
    ),
    "profiler_config": Foreign("use trace"),
    "pt_load_map_location": Foreign("leave it out, safetensors are read", (None, "cpu")),
    "quantization": QUANTISED,
    "quantization_config": QUANTISED,
    "ray_workers_use_nsight": ONE_HOST,
    "reasoning_parser": SERVED,
    "revision": REVISION,
    "rope_scaling": CONFIG_FILE,
    "rope_theta": CONFIG_FILE,
    "runner": Foreign(ONLY_GENERATES.remedy, (None, "auto", "generate")),
    "safetensors_load_strategy": Foreign("leave it out, safetensors are read", (None, "lazy")),
    "scheduler_cls": Foreign("use scheduling_policy"),
    "scheduler_delay_factor": IN_CHUNKS,
    "served_model_name": SERVED,
    "show_hidden_metrics_for_version": OBSERVED,
    "skip_mm_profiling": Foreign(ONLY_TEXT.remedy, (None, True, False)),
    "skip_tokenizer_init": Foreign("leave it out, and give token ids", (None, False)),
    "speculative_config": NOT_SPECULATIVE,
    "speculative_model": NOT_SPECULATIVE,
    "stream_interval": Foreign("leave it out, stream brings each token", (None, 1)),
    "structured_outputs_config": STRUCTURED,
    "swap_space": Foreign(
        "leave it out, preempted requests are computed anew", (None, 0, 0.0, 4, 4.0)
    ),
    "task": Foreign(ONLY_GENERATES.remedy, (None, "auto", "generate")),
    "tokenizer": Foreign(
        "leave it out if it is the model's, or put its files into the model's folder",
        same_as="model",
    ),
    "tokenizer_mode": Foreign("leave it out, it is read as transformers does", (None, "auto")),
    "tokenizer_pool_size": Foreign("leave it out, one tokenizer uses all cores", (None, 0)),
    "tokenizer_revision": REVISION,
    "trust_remote_code": Foreign(
        "leave it out, no code of a model folder is ever run", (None, False)
    ),
    "use_tqdm_on_load": Foreign("leave it out, loading shows no progress", (None, False)),
    "use_v2_block_manager": Foreign("leave it out, there is one kind of blocks", (None, True)),
    "worker_cls": ONE_HOST,
    "worker_extension_cls": ONE_HOST,
    "worker_use_ray": ONE_HOST,
}
PARAMETERS = {
    "best_of": Foreign("use n, and choose by cumulative_logprob", (None, 1), same_as="n"),
    "detokenize": Foreign("leave it out, and read token_ids", (None, True)),
    "early_stopping": NO_BEAMS,
    "extra_args": Foreign("leave it out, nothing reads it", (None, {})),
    "flat_logprobs": Foreign("leave it out, and read the dicts' logprobs", (None, False)),
    "guided_decoding": Foreign("use structured_outputs"),
    "length_penalty": NO_BEAMS,
    "logprob_token_ids": Foreign("use logprobs"),
    "output_kind": Foreign("leave it out: generate returns all at the end, stream what is new"),
    "output_text_buffer_length": Foreign("leave it out, and use stream", (None, 0)),
    "repetition_detection": Foreign("use repetition_penalty or stop"),
    "skip_reading_prefix_cache": Foreign(
        "make the LLM with enable_prefix_caching=False", (None, False)
    ),
    "skip_clone": Foreign("leave it out, nothing changes a SamplingParams", (None, True, False)),
    "spaces_between_special_tokens": Foreign(
        "leave it out, text is as the tokenizer decodes it", (None, True)
    ),
    "thinking_token_budget": Foreign("use max_tokens"),
    "truncate_prompt_tokens": Foreign("shorten what encode returns, and give these token ids"),
    "truncation_side": Foreign("shorten what encode returns, and give these token ids"),
    "use_beam_search": NO_BEAMS,
}
OF_TRANSFORMERS = {  # its generate's, and its GenerationConfig's
    "bad_words_ids": Foreign("use bad_words"),
    "do_sample": Foreign("use temperature, which is 0 for the likeliest token", (None, True)),
    "eos_token_id": Foreign("use stop_token_ids"),
    "logits_processor": Foreign("use logits_processors"),
    "max_length": Foreign("use max_tokens, which counts the output alone"),
    "max_new_tokens": Foreign("use max_tokens", same_as="max_tokens"),
    "min_length": Foreign("use min_tokens, which counts the output alone", (None, 0)),
    "min_new_tokens": Foreign("use min_tokens", (None, 0), same_as="min_tokens"),
    "no_repeat_ngram_size": Foreign("use repetition_penalty or logits_processors", (None, 0)),
    "num_beams": NO_BEAMS,
    "num_return_sequences": Foreign("use n", (None, 1), same_as="n"),
    "output_logits": Foreign("use logprobs", (None, False)),
    "output_scores": Foreign("use logprobs", (None, False)),
    "pad_token_id": Foreign("leave it out, nothing is padded"),
    "return_dict_in_generate": Foreign("leave it out, dicts are returned", (None, True)),
    "stop_strings": Foreign("use stop", same_as="stop"),
    "streamer": Foreign("use stream"),
    "use_cache": Foreign("leave it out, keys and values are always cached", (None, True)),
}
OF_PRETRAINED = {  # its from_pretrained's
    "attn_implementation": Foreign("use attention_backend"),
    "cache_dir": Foreign("set the variable HF_HOME"),
    "device_map": Foreign("use device, or tensor_parallel_size for several GPUs"),
    "load_in_4bit": Foreign(QUANTISED.remedy, (None, False)),
    "load_in_8bit": Foreign(QUANTISED.remedy, (None, False)),
    "local_files_only": Foreign("set the variable HF_HUB_OFFLINE", (None, False)),
    "low_cpu_mem_usage": Foreign("leave it out, it is so", (None, True)),
    "token": Foreign("set the variable HF_TOKEN", (None, False)),
    "torch_dtype": Foreign("use dtype", same_as="dtype"),
    "use_safetensors": Foreign("leave it out, safetensors are read", (None, True)),
}
OF_OTHER_ENGINES = {  # names that SGLang, TensorRT-LLM, llama.cpp or pipelines have for options
    "batch_size": Foreign("use max_num_seqs, the most sequences that run at the same time"),
    "context_length": Foreign("use max_model_len", same_as="max_model_len"),
    "max_batch_size": Foreign("use max_num_seqs, the most sequences that run at the same time"),
    "max_running_requests": Foreign("use max_num_seqs", same_as="max_num_seqs"),
    "mem_fraction_static": Foreign("use gpu_memory_utilization"),
    "n_ctx": Foreign("use max_model_len", same_as="max_model_len"),
    "num_gpus": Foreign("use tensor_parallel_size", (None, 1), same_as="tensor_parallel_size"),
    "tp_size": Foreign("use tensor_parallel_size", (None, 1), same_as="tensor_parallel_size"),
}
GUIDED = {  # vLLM's, before structured_outputs
    f"guided_{kind}": Foreign(f"use structured_outputs={{{kind!r}: ...}}") for kind in KINDS
}
GUIDED |= {
    "guided_decoding_backend": STRUCTURED,
    "guided_whitespace_pattern": Foreign(
        "use structured_outputs={'json': ..., 'whitespace_pattern': ...}"
    ),
}
# What others give beside the sampling parameters themselves, for the form of an output.
UNWRAPPED = {kind: Foreign(f"use structured_outputs={{{kind!r}: ...}}") for kind in KINDS}
UNWRAPPED |= {
    "json_schema": Foreign("use structured_outputs={'json': ...}"),
    "max_completion_tokens": Foreign("use max_tokens", same_as="max_tokens"),
    "response_format": Foreign("use structured_outputs={'json': ...}", (None, {"type": "text"})),
}
# What SamplingParams takes, given elsewhere.
OF_PARAMS = {
    field.name: Foreign(f"give SamplingParams({field.name}=...)", ())
    for field in fields(SamplingParams)
}
IN_CALL = OF_PARAMS | {
    name: Foreign(f"in SamplingParams, {foreign.remedy}", ())
    for name, foreign in (OF_TRANSFORMERS | GUIDED).items()
}
IN_GENERATE = {
    "guided_options_request": Foreign("give SamplingParams(structured_outputs=...)"),
    "lora_request": NO_LORA,
    "mm_processor_kwargs": ONLY_TEXT,
    "priority": Foreign("give a SamplingParams with its priority for each prompt"),
    "prompt_adapter_request": NO_LORA,
    "prompt_token_ids": Foreign("give them as prompts"),
    "tokenization_kwargs": Foreign("give the token ids that get_tokenizer() makes", (None, {})),
}
IN_CHAT = {
    "add_generation_prompt": Foreign(IN_TEMPLATE, (None, True)),
    "chat_template": Foreign(IN_TEMPLATE),
    "chat_template_content_format": Foreign(
        "leave it out, the template gets texts", (None, "auto", "string")
    ),
    "continue_final_message": Foreign(
        f"{IN_TEMPLATE}, with add_generation_prompt=False", (None, False)
    ),
    "lora_request": NO_LORA,
    "mm_processor_kwargs": ONLY_TEXT,
    "tokenization_kwargs": Foreign("give generate what encode_chat returns", (None, {})),
    "tools": Foreign(IN_TEMPLATE),
}
IN_PROMPT = {
    "role": Foreign("a conversation goes to chat or stream_chat"),
    "cache_salt": Foreign("leave it out, or make the LLM with enable_prefix_caching=False"),
    "decoder_prompt": Foreign("use 'prompt', models are decoders alone"),
    "encoder_prompt": Foreign("use 'prompt', models are decoders alone"),
    "mm_processor_kwargs": ONLY_TEXT,
    "multi_modal_data": ONLY_TEXT,
    "multi_modal_uuids": ONLY_TEXT,
    "prompt_embeds": Foreign("give 'prompt_token_ids'"),
    "token_type_ids": Foreign("leave it out, models are decoders alone"),
}
IN_FORM = {
    "backend": STRUCTURED,
    "disable_fallback": Foreign("leave it out, there is one backend", (None, False, True)),
}
IN_WAKE_UP = {
    "tags": Foreign("leave it out, the weights and the KV cache come back together"),
}
# What its server takes beside OpenAI's fields, in the lines of a job.
IN_LINE = OF_TRANSFORMERS | PARAMETERS | GUIDED | {"tools": Foreign(IN_TEMPLATE, (None, []))}
FOREIGN = {
    "LLM": OF_PARAMS | OF_PRETRAINED | OF_OTHER_ENGINES | OPTIONS,
    "SamplingParams": OF_TRANSFORMERS | PARAMETERS | GUIDED | UNWRAPPED,
    "generate": IN_CALL | IN_GENERATE,
    "chat": IN_CALL | IN_CHAT,
    "prompt": IN_PROMPT,
    "StructuredOutputsParams": IN_FORM,
    "wake_up": IN_WAKE_UP,
    "a line": IN_LINE,
    "body": IN_LINE,
}
DEFAULTS = {
    "LLM": {
        "max_num_batched_tokens": (None,),
        "max_num_seqs": (None,),
        "enable_prefix_caching": (None,),
        "enforce_eager": (None,),
        "attention_backend": (None,),
        "load_format": ("safetensors",),
    }
}
