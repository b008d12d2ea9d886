"""Line charts as SVG for the scripts that draw pictures of docs/, in the style of the charts
of still itself (src/cli/report): its style sheet, colours, marks and distances. Light and
dark by the reader's setting."""
import ast
import html
import math
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent
REPORT = ROOT / "src/cli/report"
PANEL, TOP, PLOT, BOTTOM, LEFT, RIGHT = 440, 92, 260, 52, 72, 16

# Of a line: its mark and its colour. Methods have the same in every chart.
LOOKS = {"still": (0, 0), "smollm2-still": (0, 0), "softmax": (1, 1),
         "smollm2, softmax": (1, 1), "lolcats": (2, 2), "LoLCATs": (2, 2),
         "smollm2 in llama.cpp": (3, 6)}


def strings_of(path, declaration):
    """The string literals of an initializer in a C file."""
    text = (REPORT / path).read_text().split(declaration, 1)[1].split(";\n", 1)[0]
    return [ast.literal_eval(found) for found in re.findall(r'"(?:[^"\\]|\\.)*"', text)]


STYLE = "".join(strings_of("svg.c", "style ="))
MARKS = strings_of("svg.c", "shape[] =")


def text(x, y, anchor, look, words):
    look = f' class="{look}"' if look else ""
    return (f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{look}>'
            f'{html.escape(words)}</text>')


def mark(x, y, look):
    return f'<path class="mark f{look[1]}" d="M{x:.1f} {y:.1f}{MARKS[look[0]]}"/>'


def linear_ticks(low, high):
    """From at most low to at least high, in steps of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / 5
    ten = 10 ** math.floor(math.log10(rough))
    step = next(k * ten for k in (1, 2, 5, 10) if rough <= k * ten)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(i * step, 9) for i in range(first, last + 1)]


def log_ticks(low, high):
    return [10.0 ** d for d in range(math.floor(math.log10(low)),
                                     math.ceil(math.log10(high)) + 1)]


def length(n):
    return f"{n / 1024:g}K" if n >= 1024 else f"{n:g}"


def panel(out, left, title, lines, x_title, x_ticks, x_text=length, x_linear=False,
          y_from=0, y_log=False, level=None):
    """lines: {name: [(x, y)]}; level: (y, words) of a dashed line across."""
    scale = (lambda v: v) if x_linear else math.log2
    y_scale = math.log10 if y_log else (lambda v: v)
    every = [p for points in lines.values() for p in points]
    values = [y for _, y in every] + ([level[0]] if level else [])
    ticks = (log_ticks(min(values), max(values)) if y_log
             else linear_ticks(min(y_from, *values), max(values)))
    x0, x1 = left + LEFT, left + PANEL - RIGHT
    ends = [scale(x) for x in [x for x, _ in every] + list(x_ticks)]
    place = lambda v: x0 + 12 + (x1 - x0 - 24) * (scale(v) - min(ends)) / (max(ends) - min(ends))
    bottom, top = y_scale(ticks[0]), y_scale(ticks[-1])
    height = lambda v: TOP + PLOT - PLOT * (y_scale(v) - bottom) / (top - bottom)
    for v in ticks:
        out.append(f'<path class="grid" d="M{x0:.1f} {height(v):.1f}H{x1:.1f}"/>')
        out.append(text(x0 - 6, height(v) + 4, "end", "faint", f"{v:.6g}"))
    out.append(f'<path class="axis" d="M{x0:.1f} {TOP}V{TOP + PLOT}H{x1:.1f}"/>')
    out.append(text((x0 + x1) / 2, TOP + PLOT + 40, "middle", "faint", x_title))
    out.append(text(x0, TOP - 12, "start", "bold", title))
    for v in x_ticks:
        out.append(text(place(v), TOP + PLOT + 18, "middle", "faint", x_text(v)))
    if level:
        y = height(level[0])
        out.append(f'<path class="line s6" stroke-dasharray="7 3" d="M{x0:.1f} {y:.1f}H{x1:.1f}"/>')
        near = min((v for x, v in every if place(x) > (x0 + x1) / 2),
                   key=lambda v: abs(v - level[0]), default=level[0])
        out.append(text(x1, y + (16 if near > level[0] else -7), "end", "faint", level[1]))
    for name, points in reversed(lines.items()):  # the first lies on top
        look = LOOKS[name]
        path = "L".join(f"{place(x):.1f} {height(y):.1f}" for x, y in points)
        out.append(f'<path class="line s{look[1]}" d="M{path}"/>')
        out += [mark(place(x), height(y), look) for x, y in points]


def chart(title, panels):
    """panels: dicts of arguments of panel(), side by side."""
    width, tall = PANEL * len(panels), TOP + PLOT + BOTTOM
    out = ['<svg xmlns="http://www.w3.org/2000/svg" class="still" role="img" '
           f'viewBox="0 0 {width} {tall}" width="{width}" height="{tall}">\n'
           f'<title>{html.escape(title)}</title>', STYLE.rstrip("\n"),
           f'<rect class="ground" width="{width}" height="{tall}"/>',
           text(LEFT, 26, "start", "head", title)]
    x = LEFT
    for name in dict.fromkeys(name for p in panels for name in p["lines"]):
        look = LOOKS[name]
        out.append(f'<path class="line s{look[1]}" d="M{x:.1f} 50h24"/>')
        out.append(mark(x + 12, 50, look))
        out.append(text(x + 30, 54, "start", "", name))
        x += 54 + 7.2 * len(name)
    for k, p in enumerate(panels):
        panel(out, k * PANEL, **p)
    return "\n".join(out + ["</svg>"]) + "\n"
