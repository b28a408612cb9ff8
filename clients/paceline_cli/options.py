"""The options that several commands share, each with the one sentence of its help."""

import functools
import inspect
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ParamSpec, get_type_hints

import typer

from paceline_cli.answer_bound import ANSWER_TOKENS
from paceline_client.config import Retry, Timeout, Tls
from paceline_client.requests import Sampling, TemplateValue, invalid

_P = ParamSpec("_P")

_CONNECT_SECONDS = 1.0
DEFAULT_MODEL = "smollm2-135m-instruct"

_MODEL_HELP = (
    "A GGUF file, a model folder, a known name, or a model of the Hugging Face hub: org/name, org/name:FILE.gguf or"
    " org/name:Q4_K_M."
)
ModelOption = Annotated[str, typer.Option("--model", metavar="PATH|NAME", help=_MODEL_HELP)]
ModelIfAnyOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="PATH|NAME",
        help=f"{_MODEL_HELP} Unset, {DEFAULT_MODEL}; with --runner simulated, none.",
    ),
]
OfflineOption = Annotated[bool, typer.Option("--offline", help="Fetch nothing: use only models that are here already.")]
NumExecutorsOption = Annotated[
    int,
    typer.Option("--executors", metavar="N", min=1, max=64, help="How many executors, each with its own model copy."),
]
PortOption = Annotated[
    int,
    typer.Option(
        "--port",
        metavar="PORT",
        min=1,
        max=65530,
        help="The scheduler's API; +1 is its admin, +2 its health port; +3 to +5 are the standby's.",
    ),
]
StandbyOption = Annotated[
    bool,
    typer.Option("--standby", help="Run a second scheduler, which takes over within a moment when the first one dies."),
]
ExecutorPortOption = Annotated[
    int,
    typer.Option(
        "--executor-port", metavar="PORT", min=1, max=64900, help="The first executor's; +2 health, +10 for the next."
    ),
]
RunnerOption = Annotated[
    str | None,
    typer.Option(
        "--runner",
        metavar="KIND",
        help="What executors compute on: auto, cuda or cpu; twin for rehearsals; simulated: they have no model.",
    ),
]
GatewayOption = Annotated[
    bool,
    typer.Option("--gateway", help="Serve OpenAI's HTTP API too, on port 8000; 7 above --port where that is given."),
]
HostOption = Annotated[
    str, typer.Option("--host", metavar="ADDRESS", help="Where the API listens; executors stay on loopback.")
]
InsecureOption = Annotated[
    bool, typer.Option("--insecure", help="Let --host name an address that other machines reach, without encryption.")
]
ShutdownOption = Annotated[
    int, typer.Option("--shutdown-timeout", metavar="SECONDS", min=0, help="How long running requests may take to end.")
]
NumThreadsOption = Annotated[
    int | None, typer.Option("--num-threads", metavar="N", min=1, help="CPU threads of each executor.")
]
MetricsPortOption = Annotated[
    int | None,
    typer.Option(
        "--metrics-port",
        metavar="PORT",
        min=1,
        max=64800,
        help="The scheduler's metrics; +3 the standby's; +1 the first executor's, +10 for the next."
        " Unset, 9464, or 6 above --port and --executor-port where these are given.",
    ),
]
LogDirOption = Annotated[
    Path | None, typer.Option("--log-dir", metavar="FOLDER", help="Keep each process's log lines in a file here.")
]

MaxTokensOption = Annotated[
    int | None, typer.Option("--max-tokens", metavar="N", help="Output tokens at most; unset, what the context holds.")
]
AnswerTokensOption = Annotated[
    int | None, typer.Option("--max-tokens", metavar="N", help=f"Output tokens at most; unset, {ANSWER_TOKENS:,}.")
]
TemperatureOption = Annotated[
    float | None,
    typer.Option("--temperature", "-t", metavar="X", help="Randomness, 0 to 100; 0 always takes the likeliest token."),
]
TopPOption = Annotated[
    float | None,
    typer.Option(
        "--top-p", metavar="X", help="Draw from the likeliest tokens that make up this probability, above 0 up to 1."
    ),
]
TopKOption = Annotated[int | None, typer.Option("--top-k", metavar="N", help="Draw from this many likeliest tokens.")]
MinPOption = Annotated[
    float | None,
    typer.Option("--min-p", metavar="X", help="Drop tokens less likely than this share of the likeliest, 0 to 1."),
]
SeedOption = Annotated[int | None, typer.Option("--seed", metavar="N", help="Makes the draw repeatable.")]
PresencePenaltyOption = Annotated[
    float | None, typer.Option("--presence-penalty", metavar="X", help="Against tokens that were used; -2 to 2.")
]
FrequencyPenaltyOption = Annotated[
    float | None,
    typer.Option("--frequency-penalty", metavar="X", help="Against tokens for each time they were used; -2 to 2."),
]
RepetitionPenaltyOption = Annotated[
    float | None,
    typer.Option(
        "--repetition-penalty", metavar="X", help="Of prompt and output tokens, above 0 up to 10; above 1 discourages."
    ),
]
NumCompletionsOption = Annotated[
    int | None, typer.Option("-n", "--n", metavar="N", help="How many answers to the same prompt, up to 16.")
]
MinTokensOption = Annotated[
    int | None,
    typer.Option("--min-tokens", metavar="N", help="Output tokens before which nothing but the context's end ends it."),
]
LogprobsOption = Annotated[
    int | None,
    typer.Option("--logprobs", metavar="N", help="With --json: log-probabilities, and the N likeliest tokens."),
]
MaxNumDraftTokensOption = Annotated[
    int | None,
    typer.Option(
        "--max-draft-tokens", metavar="N", help="Drafts of a step at most, 0 to 63; 0 drafts nothing. Unset: as useful."
    ),
]
RequestTimeoutOption = Annotated[
    float | None, typer.Option("--timeout", metavar="SECONDS", help="How long the answer may take as a whole.")
]
MaxOutageOption = Annotated[
    float | None,
    typer.Option(
        "--max-outage",
        metavar="SECONDS",
        help="How long to wait for an executor or a scheduler that is away; unset, 60. With --timeout that counts.",
    ),
]
PriorityOption = Annotated[
    int | None, typer.Option("--priority", metavar="N", help="Lower runs earlier; -100 to 100, unset is 0.")
]
TenantOption = Annotated[str, typer.Option("--tenant", metavar="NAME", help="Whose request it is.")]
StopOption = Annotated[
    list[str] | None, typer.Option("--stop", metavar="TEXT", help="End at this text. May be given several times.")
]
ServedModelOption = Annotated[
    str | None, typer.Option("--model", metavar="NAME", help="The model to ask; unset, the only one.")
]
TlsDirOption = Annotated[
    Path | None,
    typer.Option(
        "--tls-dir",
        metavar="FOLDER",
        help="Encrypt: ca.crt, and tls.crt with tls.key where clients need a certificate.",
    ),
]
TokenFileOption = Annotated[
    Path | None,
    typer.Option("--token-file", metavar="FILE", help="The token to show, in a file. Default: PACELINE_TOKEN."),
]
OwnTlsDirOption = Annotated[
    Path | None,
    typer.Option(
        "--tls-dir",
        metavar="FOLDER",
        help="Encrypt, and ask callers who they are: ca.crt, tls.crt and tls.key. The certificate of both programs, so"
        " for 127.0.0.1 and paceline://scheduler.",
    ),
]
TokensOption = Annotated[
    Path | None,
    typer.Option("--tokens", metavar="FILE", help="Who may call: hashed tokens, as 'paceline token' makes them."),
]
SystemOption = Annotated[
    str | None, typer.Option("--system", metavar="TEXT", help="What the model is told before the conversation.")
]

ToolsOption = Annotated[
    Path | None,
    typer.Option("--tools", metavar="FILE", help="What the model may call: a JSON list of tools."),
]
TemplateArgumentOption = Annotated[
    list[str] | None,
    typer.Option(
        "--template-argument",
        metavar="NAME=VALUE",
        help="For the chat template, such as enable_thinking=false. May be given several times.",
    ),
]


def names_of(command: Callable[..., None]) -> frozenset[str]:
    """Of all options of a command, as they are written."""
    kinds = get_type_hints(command, include_extras=True).values()
    described = [each for kind in kinds for each in getattr(kind, "__metadata__", ())]
    return frozenset(name for each in described for name in (each.default, *(each.param_decls or ())))


def model_for(runner: str | None, model: str | None) -> str | None:
    """The model that executors are told: the default one unless they need none."""
    is_simulated = runner is not None and runner.partition(":")[0] == "simulated"
    return model if model is not None or is_simulated else DEFAULT_MODEL


_SAMPLING_OPTIONS: dict[str, Any] = {
    "temperature": TemperatureOption,
    "top_p": TopPOption,
    "top_k": TopKOption,
    "min_p": MinPOption,
    "seed": SeedOption,
    "presence_penalty": PresencePenaltyOption,
    "frequency_penalty": FrequencyPenaltyOption,
    "repetition_penalty": RepetitionPenaltyOption,
}


def takes_sampling(command: Callable[_P, None]) -> Callable[_P, None]:
    """Where the command takes `sampling`, users find an option for each parameter. Ranges are the server's to check."""
    return _expanded(command, "sampling", _SAMPLING_OPTIONS, lambda chosen: Sampling(**chosen))


@dataclass(frozen=True, slots=True)
class Handed:
    """Options for the command lines of programs, as they were typed."""

    scheduler: tuple[str, ...] = ()
    executor: tuple[str, ...] = ()


def hands_on(command: Callable[_P, None]) -> Callable[_P, None]:
    """Where the command takes `handed`, users find the programs' own options, which these check."""
    found = {option.flag.removeprefix("--").replace("-", "_"): option for option in HANDED_OPTIONS}
    options = {
        name: Annotated[
            str | None,
            typer.Option(option.flag, metavar=option.metavar, help=option.help, rich_help_panel=_PANELS[option.of]),
        ]
        for name, option in found.items()
    }

    def handed(chosen: dict[str, Any]) -> Handed:
        def of(program: str) -> tuple[str, ...]:
            typed = ((found[name], value) for name, value in chosen.items() if value is not None)
            return tuple(part for option, value in typed if program in option.of for part in (option.flag, value))

        return Handed(of(_SCHEDULER), of(_EXECUTOR))

    return _expanded(command, "handed", options, handed)


_SCHEDULER, _EXECUTOR = "scheduler", "executor"
_PANELS = {
    (_SCHEDULER,): "Options of the scheduler",
    (_EXECUTOR,): "Options of executors",
    (_SCHEDULER, _EXECUTOR): "Options of both",
}


@dataclass(frozen=True, slots=True)
class HandedOption:
    flag: str
    metavar: str
    help: str
    of: tuple[str, ...] = (_EXECUTOR,)


HANDED_OPTIONS = (
    HandedOption("--revision", "NAME", "Branch, tag or commit of a model of the Hugging Face hub."),
    HandedOption("--served-model-name", "NAME", "What requests call the model; unset, its name or file name."),
    HandedOption("--quantization", "KIND", "auto: weights as small as the file has them; none: float32."),
    HandedOption("--max-model-len", "TOKENS", "Prompt and output of a request together."),
    HandedOption("--max-num-seqs", "N", "Requests that run at once on an executor."),
    HandedOption("--max-num-batched-tokens", "TOKENS", "Tokens of a step; schedulers plan shorter ones if need be."),
    HandedOption("--kv-cache-memory", "SIZE", "Each executor's KV cache, such as 512MiB."),
    HandedOption("--kv-cache-dtype", "DTYPE", "Keys and values as int8 (auto) or float16."),
    HandedOption("--gpu-memory-utilization", "SHARE", "How much of a GPU's memory an executor takes; unset, 0.9."),
    HandedOption("--tensor-parallel-size", "RANKS", "Processes of each executor that share a model's layers."),
    HandedOption("--cache-dir", "FOLDER", "Where known models and tokenizers are kept.", (_SCHEDULER, _EXECUTOR)),
    HandedOption(
        "--speculation",
        "JSON|FILE",
        'Drafts of a request and step: {"max_num_draft_tokens": 4}; 0: none.',
        (_SCHEDULER,),
    ),
    HandedOption("--record-dir", "FOLDER", "Record plans and results there, for 'paceline replay'.", (_SCHEDULER,)),
    HandedOption("--log-requests", "SHARE", "Which share of the requests has a line in the log.", (_SCHEDULER,)),
)


def _expanded(
    command: Callable[_P, None], taken: str, options: dict[str, Any], made_of: Callable[[dict[str, Any]], object]
) -> Callable[_P, None]:
    """A command with all these options in the place of the parameter `taken`, which is made of them."""

    @functools.wraps(command)
    def with_options(*args: _P.args, **values: _P.kwargs) -> None:
        values[taken] = made_of({name: values.pop(name) for name in options})
        command(*args, **values)

    keyword = inspect.Parameter.KEYWORD_ONLY
    own = [inspect.Parameter(name, keyword, default=None, annotation=option) for name, option in options.items()]
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        parameters += own if parameter.name == taken else [parameter.replace(kind=keyword)]
    vars(with_options)["__signature__"] = inspect.Signature(parameters)
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_options


def read_text_file(path: Path, option: str) -> str:
    """The file that an option names."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"cannot read {path}: {error}", param_hint=option) from None


def tools_of(path: Path | None) -> Any:  # noqa: ANN401 (JSON, which the client library checks)
    """What a file of tools says."""
    if path is None:
        return None
    try:
        return json.loads(read_text_file(path, "--tools"))
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"{path} is no JSON: {error}", param_hint="--tools") from None


def template_arguments_of(given: Iterable[str] | None) -> dict[str, TemplateValue]:
    """A value that is no flag, number or text of JSON is a text as it stands."""
    arguments: dict[str, TemplateValue] = {}
    for name, separator, text in (each.partition("=") for each in given or ()):
        if not separator:
            raise typer.BadParameter("write it as NAME=VALUE", param_hint="--template-argument")
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = text
        arguments[name] = value if isinstance(value, TemplateValue) else text
    return arguments


def tls_of(folder: Path | None) -> Tls | None:
    """Encryption with the certificates of a folder."""
    return None if folder is None else Tls(folder=folder)


def timeout_of(total_seconds: float | None) -> Timeout:
    """How long a command waits: for a server not long, because a person waits. InvalidRequestError for no time."""
    try:
        return Timeout(connect_seconds=_CONNECT_SECONDS, total_seconds=total_seconds)
    except ValueError as error:
        raise invalid("timeout", str(error)) from None


def retry_of(max_outage_seconds: float | None) -> Retry:
    """How long a request waits for somebody to serve it. InvalidRequestError for no time."""
    try:
        return Retry() if max_outage_seconds is None else Retry(max_outage_seconds=max_outage_seconds)
    except ValueError as error:
        raise invalid("max_outage", str(error)) from None
