"""Numbers that others published, to be printed beside ours and always marked as published.

They come from other harnesses: prompts, steps, sampling and sometimes the retriever differ, and one
method's numbers differ between papers by several points. Compare systems inside one harness; these
rows say where it stands. Must not know: files, how ours were made.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mas_jax.evaluation.report import Grid

SETS = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
AVERAGE = "average"  # macro mean over the seven sets
_ALL = (*SETS, AVERAGE)
_AT_4 = (AVERAGE, "pass@4", "4/4")
_HOPS = ("single-hop", "multi-hop")


@dataclass(frozen=True)
class Row:
    """One system as published. values: column -> percent, for the columns that its source gives.

    metric: what the values are. source: where they were read. digits: behind the point, as
    published. note: what keeps them from being comparable, if anything is known.
    """

    system: str
    backbone: str
    metric: str
    values: Mapping[str, float]
    source: str
    digits: int
    note: str = ""


def _rows(
    text: str,
    *,
    columns: Sequence[str],
    source: str,
    metric: str = "EM",
    note: str = "",
    fractions: bool = False,
) -> tuple[Row, ...]:
    """Rows of lines "system | backbone | values in the columns' order", - where there is none."""
    lines = [[part.strip() for part in line.split("|")] for line in text.strip().splitlines()]
    decimals = max(len(cell.partition(".")[2]) for *_, cells in lines for cell in cells.split())
    scale, digits = (100, decimals - 2) if fractions else (1, decimals)
    rows = []
    for system, backbone, cells in lines:
        pairs = zip(columns, cells.split(), strict=True)
        values = {name: round(scale * float(cell), digits) for name, cell in pairs if cell != "-"}
        rows.append(Row(system, backbone, metric, values, source, digits, note))
    return tuple(rows)


_MULTI_AGENT_OPD = _rows(
    """
    MultiAgent-OPD             | Qwen3-4B-Instruct-2507 | 38.68 48.73 29.27
    Tree-GRPO                  | Qwen3-4B-Instruct-2507 | 37.37 47.53 -
    C-MAS + RL                 | Qwen3-4B-Instruct-2507 | 36.07 45.97 27.05
    Prompted Critic            | Qwen3-4B-Instruct-2507 | 34.62 45.96 23.24
    no Searcher supervision    | Qwen3-4B-Instruct-2507 | 29.82 - -
    untrained teacher          | Qwen3-4B-Instruct-2507 | 29.50 - -
    H-MAS base                 | Qwen3-4B-Instruct-2507 | 28.60 - -
    C-MAS base                 | Qwen3-4B-Instruct-2507 | 25.09 - -
    Searcher with outcome RL   | Qwen3-4B-Instruct-2507 | 17.78 - -
    """,
    columns=_AT_4,
    source="MultiAgent-OPD",
    metric="EM, avg@4",
    note="a fixed set of 5,000 questions",
)
_SEARCH_R1 = _rows(
    """
    RAG                       | 7B                  | 34.9 58.5 39.2 29.9 23.5  5.8 20.8 30.4
    rejection sampling        | 7B                  | 36.0 59.2 38.0 33.1 29.6 12.3 35.5 34.8
    Search-R1 (PPO)           | Qwen2.5-7B          | 48.0 63.8 45.7 43.3 38.2 19.6 43.2 43.1
    Search-R1 (PPO)           | Qwen2.5-7B-Instruct | 39.3 61.0 39.7 37.0 41.4 14.6 36.8 38.5
    Search-R1 (PPO)           | Qwen2.5-3B          | 40.6 58.7 43.5 28.4 27.3  4.9  8.8 30.3
    Search-R1 (PPO)           | Qwen2.5-3B-Instruct | 34.1 54.5 37.8 32.4 31.9 10.3 26.4 32.5
    """,
    columns=_ALL,
    source="Search-R1",
    note="greedy, one seed",
)
_OPD_SEARCH = _rows(
    """
    direct answer       | Qwen2.5-3B          | .106 .288 .108 .149 .244 .020 .024 .134
    naive RAG           | Qwen2.5-3B          | .348 .544 .387 .255 .226 .047 .080 .270
    Search-o1           | Qwen2.5-3B          | .238 .472 .262 .221 .218 .054 .320 .255
    Search-R1           | Qwen2.5-3B          | .421 .583 .413 .297 .274 .066 .128 .312
    Search-R1           | Qwen2.5-3B-Instruct | .397 .565 .391 .331 .310 .124 .232 .336
    ReSearch            | Qwen2.5-3B          | .427 .597 .430 .305 .272 .074 .128 .319
    ReSearch            | Qwen2.5-3B-Instruct | .365 .571 .395 .351 .272 .095 .266 .331
    AutoRefine          | Qwen2.5-3B          | .467 .620 .450 .405 .393 .157 .344 .405
    AutoRefine          | Qwen2.5-3B-Instruct | .436 .597 .447 .404 .380 .169 .336 .396
    StepSearch          | Qwen2.5-3B          | -    -    -    .329 .339 .181 .328 -
    GiGPO               | Qwen2.5-3B-Instruct | .420 .595 .424 .369 .370 .126 .641 .421
    OPDSearch+          | Qwen2.5-3B          | .485 .623 .451 .458 .426 .182 .456 .440
    OPD only, 14B to 3B | Qwen2.5-3B          | -    -    -    -    -    -    -    .366
    teacher             | 14B-Instruct        | -    -    -    -    -    -    -    .399
    """,
    columns=_ALL,
    source="OPDSearch+, arXiv 2608.24310",
    fractions=True,
)
_SD_SEARCH = _rows(
    """
    SD-Search | Qwen2.5-3B          | .428
    SD-Search | Qwen2.5-3B-Instruct | .427
    SD-Search | Qwen2.5-7B          | .471
    SD-Search | Qwen2.5-7B-Instruct | .476
    """,
    columns=(AVERAGE,),
    source="SD-Search, arXiv 2605.18299",
    fractions=True,
)
_TREE_GRPO = _rows(
    """
    GRPO      | 1.5B                  | 43.4 11.3
    Tree-GRPO | 1.5B                  | 47.5 19.1
    GRPO      | 3B                    | 48.1 31.8
    GRPO      | Llama-3.2-3B-Instruct | 48.7 26.7
    Tree-GRPO | Llama-3.2-3B-Instruct | 50.0 36.8
    GRPO      | 7B                    | 50.5 36.4
    Tree-GRPO | 7B                    | 52.2 37.8
    GRPO      | 14B                   | -    41.8
    Tree-GRPO | 14B                   | -    45.3
    """,
    columns=_HOPS,
    source="Tree-GRPO, arXiv 2509.21240",
) + _rows(
    "Tree-GRPO | 3B | 46.8 59.7 43.6 42.4 43.7 17.8 43.2 50.0 36.8",
    columns=(*SETS, *_HOPS),
    source="Tree-GRPO, arXiv 2509.21240",
)
_SKYRL = _rows(
    """
    SkyRL, 2 turns | Qwen2.5-3B-Instruct | .613 .447 .334 .313 .086 .242 .356
    SkyRL, 3 turns | Qwen2.5-3B-Instruct | .616 .444 .417 .396 .179 .448 .421
    SkyRL, 4 turns | Qwen2.5-3B-Instruct | .611 .435 .407 .403 .163 .352 .403
    """,
    columns=(*SETS[1:], AVERAGE),
    source="SkyRL",
    fractions=True,
)
_TINKER = _rows(
    "tinker-cookbook | Qwen3-4B-Instruct-2507 | 51.8 70.2 52.0 47.7",
    columns=("nq", "triviaqa", "hotpotqa", "2wikimultihopqa"),
    source="tinker-cookbook",
    note="another retriever; LoRA",
)
_MAPD = _rows(
    """
    GRPO + OPSD                | Qwen3-1.7B | 30.5
    SDAR                       | Qwen3-1.7B | 37.6
    raw trajectory, one model  | Qwen3-1.7B | 30.1
    raw trajectory, agents     | Qwen3-1.7B | 29.2
    protocol, one model        | Qwen3-1.7B | 37.1
    MAPD (Claude-Opus-4.6)     | Qwen3-1.7B | 39.4
    MAPD (GPT-5.5)             | Qwen3-1.7B | 39.0
    MAPD (Gemini-3.1-Pro)      | Qwen3-1.7B | 37.9
    OPSD alone                 | Qwen3-1.7B | 5.9
    GRPO + OPSD                | Qwen3-4B   | 38.3
    SDAR                       | Qwen3-4B   | 43.0
    raw trajectory, one model  | Qwen3-4B   | 37.3
    raw trajectory, agents     | Qwen3-4B   | 36.1
    protocol, one model        | Qwen3-4B   | 42.9
    MAPD (Claude-Opus-4.6)     | Qwen3-4B   | 44.4
    MAPD (GPT-5.5)             | Qwen3-4B   | 44.6
    MAPD (Gemini-3.1-Pro)      | Qwen3-4B   | 44.0
    """,
    columns=(AVERAGE,),
    source="MAPD, arXiv 2607.24280",
    metric="success",
    note="read in a review and a reproduction, not in the paper",
)
_SDAR = _rows(
    """
    GRPO        | Qwen3-1.7B | 40.8
    GRPO + OPSD | Qwen3-1.7B | 42.2
    SDAR        | Qwen3-1.7B | 41.9
    OPID        | Qwen3-1.7B | 40.4
    GRPO        | Qwen2.5-3B | 36.4
    SDAR        | Qwen2.5-3B | 43.4
    OPID        | Qwen2.5-3B | 45.0
    GRPO        | Qwen2.5-7B | 42.0
    GRPO + OPSD | Qwen2.5-7B | 47.0
    SDAR        | Qwen2.5-7B | 49.0
    OPID        | Qwen2.5-7B | 49.2
    """,
    columns=(AVERAGE,),
    source="SDAR, arXiv 2605.15155",
    metric="Search-QA",
)

ROWS = (
    *_MULTI_AGENT_OPD,
    *_SEARCH_R1,
    *_OPD_SEARCH,
    *_SD_SEARCH,
    *_TREE_GRPO,
    *_SKYRL,
    *_TINKER,
    *_MAPD,
    *_SDAR,
)


def grid(rows: Sequence[Row], *, columns: Sequence[str], title: str) -> Grid:
    """A line for each published row, in %, the second column saying where it was published."""
    return Grid(title, ("system", "origin", *columns), _lines(rows, columns), num_text=2)


def beside(summary: Mapping, rows: Sequence[Row] = ROWS) -> Grid:
    """Ours and published ones in one table: EM in % on the seven sets and their average.

    summary: of `report.summary`; ours are avg@n, and the average is left out where a set is
    missing. Published rows without any of these columns are left out.
    Raises: ValueError if the summary has none of the seven sets, so that nothing compares.
    """
    lines = []
    for team, found in summary["teams"].items():
        values = {
            name: 100 * found["datasets"][name]["avg"] for name in SETS if name in found["datasets"]
        }
        if not values:
            raise ValueError(
                f"{team} was evaluated on {sorted(found['datasets'])}, of which none is in {SETS}; "
                "published numbers are about those"
            )
        if len(values) == len(SETS):
            values[AVERAGE] = sum(values.values()) / len(SETS)
        lines.append((team, "ours", *_cells(values, _ALL, digits=2)))
    theirs = [row for row in rows if not row.values.keys().isdisjoint(_ALL)]
    title = f"Ours (avg@{summary['num_runs']}) and published numbers, which other harnesses gave; %"
    header = ("system", "origin", *_ALL)
    return Grid(title, header, (*lines, *_lines(theirs, _ALL)), num_text=2)


def _lines(rows: Sequence[Row], columns: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    lines = []
    for row in rows:
        note = f"; {row.note}" if row.note else ""
        origin = f"published: {row.source} ({row.metric}{note})"
        cells = _cells(row.values, columns, digits=row.digits)
        lines.append((f"{row.system}, {row.backbone}", origin, *cells))
    return tuple(lines)


def _cells(values: Mapping[str, float], columns: Sequence[str], *, digits: int) -> tuple[str, ...]:
    return tuple(f"{values[name]:.{digits}f}" if name in values else "" for name in columns)
