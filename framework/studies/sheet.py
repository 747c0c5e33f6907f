"""The sheet of paper a report is written on: HTML that needs no network, its looks, and the script that draws its figures.

Every text that is given to the functions here is escaped by them.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""What a browser lets the page do: what stands in it, and nothing of the network."""

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1d2430; --soft: #5d6776; --line: #dfe3e8; --tint: #f5f7f9;
  --here: #2f74d0; --there: #d9760f; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14181d; --ink: #e4e8ed; --soft: #9aa5b1; --line: #313841; --tint: #1c2127; --here: #69a3ee; --there: #f09a45; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 24px 16px 64px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 40px 0 6px; padding-top: 14px; border-top: 1px solid var(--line); }
p { margin: 4px 0; max-width: 80ch; overflow-wrap: anywhere; }
.soft { color: var(--soft); font-size: 13px; }
.says { border-left: 3px solid var(--there); padding: 2px 12px; margin: 12px 0; }
.here { color: var(--here); } .there { color: var(--there); }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(160px, 1fr)); gap: 10px; margin: 18px 0 0; }
.tile { background: var(--tint); border-radius: 8px; padding: 10px 12px; min-width: 0; overflow-wrap: anywhere; }
.tile b { display: block; font-size: 18px; font-weight: 600; line-height: 1.35; }
.tile .there, .tile .soft { display: block; font-size: 13px; }
.pair { display: grid; grid-template-columns: minmax(0, 1fr); gap: 0 24px; }
@media (min-width: 860px) { .pair { grid-template-columns: repeat(2, minmax(0, 1fr)); } }
figure { margin: 6px 0; min-width: 0; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; padding: 4px 0 2px; }
.legend button { all: unset; cursor: pointer; font-size: 13px; overflow-wrap: anywhere; }
.legend button:focus-visible { outline: 2px solid var(--here); }
.legend button.off { opacity: 0.4; } .legend i { font-style: normal; }
.plot { width: 100%; min-width: 0; overflow: hidden; }
.scroll { overflow: auto; max-height: 460px; border: 1px solid var(--line); border-radius: 8px; margin: 10px 0; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: left; vertical-align: top; padding: 6px 12px; border-bottom: 1px solid var(--line); }
th { position: sticky; top: 0; background: var(--tint); font-weight: 600; white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
td.wide { min-width: 220px; overflow-wrap: anywhere; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
pre, code { font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
pre { margin: 0; padding: 12px; }
summary { cursor: pointer; padding: 6px 0; }
@media (max-width: 480px) { .tiles { grid-template-columns: repeat(2, minmax(0, 1fr)); } .tile b { font-size: 16px; } }
@media print { .scroll { max-height: none; overflow: visible; } }
"""

SCRIPT = """
const dark = matchMedia("(prefers-color-scheme: dark)");
const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const looks = () => {
  const found = {"paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)", "font.size": 12,
    "font.family": getComputedStyle(document.body).fontFamily, "font.color": colour("--ink"),
    "hoverlabel.bgcolor": colour("--tint"), "hoverlabel.bordercolor": colour("--line"), "hoverlabel.font.color": colour("--ink")};
  for (const axis of ["xaxis", "yaxis"])
    Object.assign(found, {[axis + ".gridcolor"]: colour("--line"), [axis + ".linecolor"]: colour("--line")});
  return found;
};
const plots = [...document.querySelectorAll(".plot")];
const drawing = plots.map(async place => {
  const drawn = JSON.parse(place.querySelector("script").textContent);
  place.replaceChildren();
  const touch = matchMedia("(pointer: coarse)").matches;
  await Plotly.newPlot(place, drawn.data, {...drawn.layout, dragmode: touch ? false : "zoom"}, {displayModeBar: false});
  await Plotly.relayout(place, looks());
  for (const button of place.parentElement.querySelectorAll("button"))
    button.addEventListener("click", () =>
      Plotly.restyle(place, {visible: button.classList.toggle("off") ? "legendonly" : true}, [Number(button.dataset.trace)]));
  new ResizeObserver(() => Plotly.Plots.resize(place)).observe(place);  // not the window's width: a scroll bar takes of the place alone
});
dark.addEventListener("change", () => plots.forEach(place => Plotly.relayout(place, looks())));
Promise.all(drawing).then(() => { document.documentElement.dataset.drawn = plots.length; });
"""


def text(words: object) -> str:
    """Escaped for HTML, inside elements and quoted attributes alike."""
    return html.escape(str(words))


def paragraph(words: object, kind: str = "") -> str:
    return f'<p class="{text(kind)}">{text(words)}</p>' if kind else f"<p>{text(words)}</p>"


def section(title: str, *parts: str) -> str:
    """A heading and what stands below it; nothing at all where there is nothing below."""
    inside = "\n".join(part for part in parts if part)
    return f"<section><h2>{text(title)}</h2>\n{inside}</section>" if inside else ""


def tile(label: str, value: str, other: str | None = None, note: str = "") -> str:
    """A figure of this run; `other` is the second run's."""
    below = "" if other is None else f'<span class="there">{text(other)}</span>'
    small = f'<span class="soft">{text(note)}</span>' if note else ""
    return f'<div class="tile"><span class="soft">{text(label)}</span><b>{text(value)}</b>{small}{below}</div>'


def table(head: Sequence[str], rows: Sequence[Sequence[object]], numbers: Sequence[int] = (), wide: Sequence[int] = ()) -> str:
    """A table in a box of its own that scrolls; columns of `numbers` stand to the right, `wide` ones hold sentences."""
    if not rows:
        return ""
    kinds = {**dict.fromkeys(wide, ' class="wide"'), **dict.fromkeys(numbers, ' class="number"')}

    def row(tag: str, cells: Sequence[object]) -> str:
        return "<tr>" + "".join(f"<{tag}{kinds.get(at, '')}>{text(cell)}</{tag}>" for at, cell in enumerate(cells)) + "</tr>"

    body = "\n".join(row("td", cells) for cells in rows)
    return f'<div class="scroll"><table><thead>{row("th", head)}</thead>\n<tbody>{body}</tbody></table></div>'


def listing(words: str) -> str:
    """A long text as it is, in a box of its own."""
    return f'<div class="scroll"><pre>{text(words)}</pre></div>'


def folded(title: str, inside: str) -> str:
    """What opens on a click; `inside` is HTML that another function here has made."""
    return f"<details><summary>{text(title)}</summary>{inside}</details>"


def plot(json: str, legend: Sequence[tuple[int, str, str, str]] = ()) -> str:
    """The place of a figure; `json` is plotly's, and nothing in it can end the script element.

    `legend` has place of the trace, mark, colour and name of what can be shown and hidden by a click.
    """
    safe = json.replace("<", "\\u003c")
    buttons = ""
    for trace, mark, colour, name in legend:
        buttons += f'<button data-trace="{trace}"><i style="color:{text(colour)}">{text(mark)}</i> {text(name)}</button>'
    above = f'<div class="legend">{buttons}</div>' if buttons else ""
    return f'<figure>{above}<div class="plot"><script type="application/json">{safe}</script></div></figure>'


def pair(*parts: str) -> str:
    """Side by side where the window is wide."""
    inside = "".join(part for part in parts if part)
    return f'<div class="pair">{inside}</div>' if inside else ""


def page(title: str, body: Sequence[str], library: str) -> str:
    """The whole file; `library` is the source of plotly.js."""
    return "\n".join([
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        f'<title>{text(title)}</title><link rel="icon" href="data:,"><style>{STYLE}</style></head><body><main>',
        *(part for part in body if part),
        f"</main><script>{library}</script><script>{SCRIPT}</script></body></html>\n",
    ])  # fmt: skip
