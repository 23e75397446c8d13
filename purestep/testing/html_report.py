"""Renders verdicts as one page of HTML that needs nothing else, to keep with the results of CI."""

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from string import Template

from purestep.testing.accepting import PartVerdict

PAGE = Template("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>
:root {
  --text: #1c2024; --quiet: #5b6470; --page: #ffffff; --panel: #f4f5f7; --line: #d9dde3;
  --holds: #0b6b3a; --wrong: #b3261e; --refuses: #8a4b00; --asked: #5b6470;
}
@media (prefers-color-scheme: dark) {
  :root {
    --text: #e6e8eb; --quiet: #a0a8b3; --page: #14171a; --panel: #1e2227; --line: #353b43;
    --holds: #6fd39b; --wrong: #ff8f86; --refuses: #f2b866; --asked: #a0a8b3;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 64rem; padding: 1.5rem 1rem 4rem;
  background: var(--page); color: var(--text); font: 1rem/1.5 system-ui, sans-serif;
}
h1 { font-size: 1.4rem; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .25rem 0 .75rem; overflow-wrap: anywhere; }
code, pre { font: .85rem/1.45 ui-monospace, monospace; }
.quiet { color: var(--quiet); font-weight: 400; }
table { border-collapse: collapse; width: 100%; margin-top: 1.5rem; }
th, td {
  text-align: left; vertical-align: top; padding: .4rem 1.25rem .4rem 0;
  border-bottom: 1px solid var(--line);
}
thead th { color: var(--quiet); font-weight: 400; }
tbody th { font-weight: 600; }
td:last-child { padding-right: 0; overflow-wrap: anywhere; }
.status { font-weight: 600; white-space: nowrap; }
.holds { color: var(--holds); } .wrong { color: var(--wrong); }
.refuses { color: var(--refuses); } .not-asked { color: var(--asked); font-weight: 400; }
section { border-left: 3px solid var(--line); padding-left: 1rem; margin-top: 1.5rem; }
section h3 { font-size: 1rem; margin: 0 0 .25rem; }
pre { background: var(--panel); border-radius: .4rem; padding: .75rem; overflow-x: auto; }
summary { cursor: pointer; }
@media (max-width: 40rem) {
  thead { display: none; }
  table, tbody, tr, th, td { display: block; }
  tbody tr { padding: .5rem 0; border-bottom: 1px solid var(--line); }
  tbody th, tbody td { border: 0; padding: 0; }
  tbody th, .status { display: inline-block; margin-right: .5rem; }
}
</style>
</head>
<body>
<h1>$title</h1>
<p class="quiet">$written, by <code>$command</code></p>
<p>$summary</p>
<table>
<thead><tr><th>law</th><th>verdict</th><th>about</th></tr></thead>
<tbody>
$rows
</tbody>
</table>
$sections
</body>
</html>
""")

ROW = Template("""\
<tr><th scope="row">$name <span class="quiet">$title</span></th>
<td class="status $status_class">$status</td>
<td>$about</td></tr>""")

SECTION = Template("""\
<section id="$anchor">
<h3>$name: <span class="$status_class">$status</span></h3>
<p>$statement</p>
<p>$reason</p>
<p><span class="quiet">The smallest case found:</span> $case.</p>
<details><summary>To see it with a trainer of yours</summary>
<pre><code>$code</code></pre>
</details>
</section>""")


def render_report(trainer: str, command: str, verdicts: Sequence[PartVerdict]) -> str:
    """Returns a page of HTML: a table of verdicts, and each failure with its smallest case.

    It also states the time and ``command``.

    Args:
        trainer: its name, for the title.
        command: that gives the verdicts.
        verdicts: on the parts of each law that was judged.
    """
    failures = [item for item in verdicts if item.verdict.case is not None]
    sections = [_render_failure(item) for item in failures]
    if sections:
        sections.insert(0, "<h2>What fails</h2>")
    now = datetime.now(UTC)
    return PAGE.substitute(
        title=escape(f"{trainer} and the laws"),
        written=f"{now:%Y-%m-%d %H:%M} UTC",
        command=escape(command),
        summary=escape(_summarize(verdicts)),
        rows="\n".join(_render_row(item) for item in verdicts),
        sections="\n".join(sections),
    )


def _summarize(verdicts: Sequence[PartVerdict]) -> str:
    """Returns, in words, how many verdicts have each status, and how many are not as expected."""
    words = []
    for status in ("holds", "wrong", "refuses", "not asked"):
        number = sum(item.verdict.status == status for item in verdicts)
        if number:
            words.append(f"{status}: {number}")
    num_complaints = sum(bool(item.complaint) for item in verdicts)
    return f"{', '.join(words)}. Not as expected: {num_complaints}."


def _render_row(part_verdict: PartVerdict) -> str:
    verdict = part_verdict.verdict
    status = escape(verdict.status)
    if verdict.case is not None:
        status = f'<a class="{status}" href="#{_anchor(part_verdict)}">{status}</a>'
    if part_verdict.accepted == verdict.status:
        status += ' <span class="quiet">(accepted)</span>'
    elif part_verdict.accepted:
        status += f' <span class="quiet">(accepted: {part_verdict.accepted})</span>'
    about = verdict.reason
    if not about:
        about = f"{verdict.cases} cases, {verdict.num_bitwise} to the bit"
    return ROW.substitute(
        name=escape(part_verdict.name),
        title=escape(verdict.law.title),
        status_class=verdict.status.replace(" ", "-"),
        status=status,
        about=escape(about),
    )


def _render_failure(part_verdict: PartVerdict) -> str:
    verdict = part_verdict.verdict
    assert verdict.case is not None
    return SECTION.substitute(
        anchor=_anchor(part_verdict),
        name=escape(part_verdict.name),
        status_class=verdict.status,
        status=verdict.status,
        statement=escape(verdict.law.statement),
        reason=escape(verdict.reason),
        case=escape(verdict.case.describe()),
        code=escape(verdict.case.reproducer()),
    )


def _anchor(part_verdict: PartVerdict) -> str:
    return part_verdict.name.replace(" ", "-")
