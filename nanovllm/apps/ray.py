"""A model as a step of a Ray Data pipeline: requests in, completions out, one LLM an actor.

`ray.data.Dataset.map_batches` makes the actors and brings the batches. Nothing here imports Ray.
"""

from dataclasses import replace
from os import PathLike
from typing import Any

from nanovllm.apps.jobs.command import make_llm
from nanovllm.apps.jobs.formats import Defaults, NativeFormat, Request, known_fields
from nanovllm.apps.jobs.parquet import RESULT, as_table, given_fields, pa
from nanovllm.apps.jobs.worker import Worker
from nanovllm.config import Config
from nanovllm.sampling_params import SamplingParams

RESULTS = pa.schema(RESULT)


class Generate:
    """A callable class for `map_batches`, which needs batch_format="pyarrow".

    A row is a request, as a line of a job is: one of prompt, prompt_token_ids and messages, and any
    field of SamplingParams; null is a field that is not there. What comes back for it is a row of
    the columns in `keep` and id, as they were; of text, token_ids, finish_reason, stop_reason,
    logprobs, num_prompt_tokens and completions, as LLM.generate returns them; and of error: why the
    row could not be done, which harms no other, or null.

    The device runs dry at the end of each batch, so a batch should have several times as many rows
    as max_num_seqs.
    """

    def __init__(
        self,
        model: str | PathLike,
        sampling_params: SamplingParams | None = None,
        *,
        chat_template_kwargs: dict[str, Any] | None = None,
        trust_request_chat_template: bool = False,
        keep: list[str] | tuple[str, ...] = (),
        **options: Any,
    ) -> None:
        """`sampling_params`: what holds where a row does not say it. `options`: of the LLM.
        `trust_request_chat_template`: let rows bring chat templates of their own, in
        chat_template_kwargs.

        Raises ValueError or TypeError for an option that is wrong.
        """
        if taken := [name for name in keep if name in RESULTS.names]:
            raise ValueError(f"keep has {taken[0]!r}, which is a column of the results: rename it")
        self._keep = dict.fromkeys(("id", *keep))
        defaults = RowDefaults(
            sampling_params or SamplingParams(),
            0,
            chat_template_kwargs,
            trust_request_chat_template,
        )
        self._format = NativeFormat(defaults)
        self._llm, self._policy = make_llm(Config.from_options(model, options))

    def __call__(self, batch: pa.Table) -> pa.Table:
        if not isinstance(batch, pa.Table):
            raise TypeError(
                f"the batch is a {type(batch).__name__}: give map_batches batch_format='pyarrow', "
                "which knows null from a number"
            )
        names = self._request_columns(batch)
        records: dict[int, dict[str, Any]] = {}
        requests: list[Request] = []
        for number, row in enumerate(batch.select(names).to_pylist()):
            try:
                requests.append(self._format.parse(number, given_fields(row)))
            except (ValueError, TypeError, RecursionError) as error:
                records[number] = {"error": str(error)}
        records |= self._serve(requests)
        table = as_table([records[number] for number in range(len(records))], RESULTS)
        kept = [name for name in self._keep if name in batch.column_names]
        for place, name in enumerate(kept):
            table = table.add_column(place, batch.schema.field(name), batch.column(name))
        return table

    def _serve(self, requests: list[Request]) -> dict[int, dict[str, Any]]:
        """The records of requests, by their numbers."""
        worker = Worker(self._llm, self._policy)  # after an error, nothing is left of it
        refused = worker.add(requests)
        worker.no_more()
        records: dict[int, dict[str, Any]] = {
            request.line: {"error": problem} for request, problem in refused
        }
        while worker.num_unfinished:
            for request, output in worker.step():
                if "error" not in output:
                    output = self._format.result(request, output)
                records[request.line] = output
        return records

    def _request_columns(self, batch: pa.Table) -> list[str]:
        """Raises ValueError for a column that neither is a request's nor is kept, or is missing."""
        for name in self._keep:
            if name not in batch.column_names and name != "id":
                raise ValueError(f"keep has {name!r}, which is no column of the dataset")
        known = known_fields(())
        for name in batch.column_names:
            if name not in known and name not in self._keep:
                raise ValueError(
                    f"the dataset has a column {name!r}, which is no field of a request: drop it, "
                    f"or let it be copied to the results by keep=[{name!r}]"
                )
        return [name for name in batch.column_names if name in known and name != "id"]


class RowDefaults(Defaults):
    """Rows have no numbers that a seed could be made of: one without a seed draws as it would in
    `generate`."""

    def params_of(self, line: int, given: dict[str, Any]) -> SamplingParams:
        return replace(self.params, **given)
