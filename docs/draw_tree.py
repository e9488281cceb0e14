"""Draws docs/trajectory_tree.svg: the running example of 002 (Figure 1), live contexts by row.

python docs/draw_tree.py
"""

from pathlib import Path

ROWS = [
    ("live view of y6 y7", [1, 2, 3, 4, 5], [6, 7]),
    ("live view of y9 y10", [1, 2, 3, 4, 6, 7, 8], [9, 10]),
    ("live view of y12", [1, 2, 3, 4, 6, 7, 9, 10, 11], [12]),
    ("live view of y13 = walk", [1, 2, 3, 4, 6, 7, 9, 10, 12], [13]),
    ("tape: naive_full (wrong)", [1, 2, 3, 4, 5, 8, 11], [6, 7, 9, 10, 12, 13]),
]
EDITS = {0: (5, "E1 = {y5}"), 1: (8, "E2 = {y8}"), 2: (11, "E3 = {y11}")}
CELL, GAP, LEFT, TOP, STEP = 40, 4, 190, 46, 58
SAMPLED, CONTEXT, INK, EDIT = "#2a7f62", "#dfe3e8", "#1c2733", "#c2571a"


def box(token: int, row: int, sampled: bool) -> str:
    x, y = LEFT + (token - 1) * (CELL + GAP), TOP + row * STEP
    fill, ink = (SAMPLED, "#ffffff") if sampled else (CONTEXT, INK)
    return (
        f'<rect x="{x}" y="{y}" width="{CELL}" height="30" rx="4" fill="{fill}"/>'
        f'<text x="{x + CELL / 2}" y="{y + 20}" text-anchor="middle" fill="{ink}">y{token}</text>'
    )


def draw() -> str:
    width, height = LEFT + 13 * (CELL + GAP) + 50, TOP + len(ROWS) * STEP + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="26" fill="{INK}" font-size="15">Each sampled token (green) saw exactly '
        "what stands left of it in its live view.</text>",
    ]
    for row, (label, context, sampled) in enumerate(ROWS):
        parts.append(f'<text x="12" y="{TOP + row * STEP + 20}" fill="{INK}">{label}</text>')
        parts += [box(token, row, False) for token in context]
        parts += [box(token, row, True) for token in sampled]
    for row, (token, text) in EDITS.items():
        x, y = LEFT + (token - 1) * (CELL + GAP) + CELL / 2, TOP + row * STEP + 30
        parts.append(
            f'<path d="M{x} {y + 2} v18" stroke="{EDIT}" stroke-width="2" fill="none"/>'
            f'<path d="M{x - 4} {y + 15} l4 7 l4 -7" fill="{EDIT}"/>'
            f'<text x="{x + 9}" y="{y + 19}" fill="{EDIT}">{text} leaves</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    Path(__file__).with_name("trajectory_tree.svg").write_text(draw())
