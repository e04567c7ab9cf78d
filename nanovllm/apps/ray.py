"""A step of a Ray Data pipeline that turns requests into completions, with one LLM per actor.

`ray.data.Dataset.map_batches` creates the actors and delivers the batches. This file does not
import Ray.
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
    """A callable class for `map_batches`, which must be given batch_format="pyarrow".

    A row is a request, like the line of a job: exactly one of prompt, prompt_token_ids and
    messages, and any field of SamplingParams. A null stands for an absent field. The result of a
    row has id and the columns in `keep`, unchanged; text, token_ids, finish_reason, stop_reason,
    logprobs, num_prompt_tokens and completions, as LLM.generate returns them; and error, which says
    why the row failed, or is null. A row that fails does not affect the others.

    The device is not fully used while the last requests of a batch finish, so a batch should have
    several times as many rows as max_num_seqs.
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
        """Load the model.

        sampling_params: the sampling parameters that a row does not set.
        chat_template_kwargs: arguments for the chat template, unless a row has its own.
        trust_request_chat_template: allow rows to bring their own chat templates in
            chat_template_kwargs. A chat template is a program.
        keep: columns to copy to the results.
        options: options of the LLM.

        Raises ValueError or TypeError for a wrong option.
        """
        if taken := [name for name in keep if name in RESULTS.names]:
            raise ValueError(
                f"keep has {taken[0]!r}, which is a column of the results: rename the column"
            )
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
        """Run the requests of a batch, and return their results in the same order."""
        if not isinstance(batch, pa.Table):
            raise TypeError(
                f"the batch is a {type(batch).__name__}: call map_batches with "
                "batch_format='pyarrow', which distinguishes null from a number"
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
        """Run requests, and return their records by row number."""
        worker = Worker(
            self._llm, self._policy
        )  # a new one for each batch, so that an error leaves nothing behind
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
        """Return the columns that are fields of requests.

        Raises ValueError for a column in `keep` that is missing, and for a column that is neither a
        field of a request nor in `keep`.
        """
        for name in self._keep:
            if name not in batch.column_names and name != "id":
                raise ValueError(
                    f"keep has {name!r}, which is not a column of the dataset: leave it out"
                )
        known = known_fields(())
        for name in batch.column_names:
            if name not in known and name not in self._keep:
                raise ValueError(
                    f"the dataset has a column {name!r}, which is not a field of a request: drop "
                    f"the column, or copy it to the results with keep=[{name!r}]"
                )
        return [name for name in batch.column_names if name in known and name != "id"]


class RowDefaults(Defaults):
    """Defaults for rows, which have no line numbers from which seeds could be derived.

    So a row without a seed is sampled as it would be in `generate`.
    """

    def params_of(self, line: int, given: dict[str, Any]) -> SamplingParams:
        """Return the sampling parameters of a row that sets those in `given`."""
        return replace(self.params, **given)
