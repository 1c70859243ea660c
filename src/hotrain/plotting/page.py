"""The page of the report: style sheet and template. Plain HTML and CSS; the figures come in as inline SVG."""

FORMULA = {
    "exact": ("g_x = g_y w", "g_w = g_yᵀ x", "saved: x"),
    "hot": ("g_x = Q4(g_y H) Q4(Hᵀ w)", "g_w = Q8(P g_y)ᵀ Q8(P x)", "saved: Q8(P x)"),
}
"""The two gradients of a layer and what is kept for them, of exact and of HOT as published."""

STYLE = """
:root{color-scheme:light dark;--paper:#fff;--card:#f6f7f8;--ink:#1b1d21;--muted:#5d636d;--grid:#dfe2e6;
--line:#dfe2e6;
--first:#0b7a75;--second:#8b4fb8;--accent:#0069b4;/*light*/}
@media (prefers-color-scheme:dark){:root{--paper:#121417;--card:#1a1d22;--ink:#eef0f3;--muted:#a2a9b4;
--grid:#30353d;
--line:#2b3037;--first:#45c4bd;--second:#c79af0;--accent:#4ea8ff;/*dark*/}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);
font:1rem/1.6 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue","Liberation Sans",Arial,sans-serif}
main{max-width:62rem;margin:0 auto;padding:2.5rem 1.25rem 4rem}
.eyebrow{margin:0;color:var(--accent);font-weight:600;font-size:.85rem;letter-spacing:.06em;
text-transform:uppercase}
h1{margin:.2rem 0 .8rem;font-size:clamp(1.6rem,4.5vw,2.35rem);line-height:1.15;letter-spacing:-.015em;
text-wrap:balance}
h2{margin:3.2rem 0 .4rem;font-size:1.3rem;line-height:1.25;letter-spacing:-.005em}
h3{margin:1.6rem 0 .3rem;font-size:1rem}
p,ul{margin:.4rem 0 .8rem;max-width:44rem}
ul{padding-left:1.15rem}
li{margin:.25rem 0}
.lead{font-size:1.08rem}
.muted,figcaption{color:var(--muted)}
code{font:.9em ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace;overflow-wrap:anywhere}
code.line{white-space:nowrap}
.formula{display:grid;grid-template-columns:repeat(4,max-content);gap:.15rem 1.8rem;background:var(--card);
border-radius:.6rem;padding:.8rem 1rem;margin:1.2rem 0;white-space:nowrap;
font:.84rem/1.65 ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace}
.formula b{font-weight:600}
.panels{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,25rem),1fr));gap:1.6rem 2rem;
margin:1rem 0}
.panels>*{margin:0;min-width:0}
figcaption{font-size:.86rem;line-height:1.45;margin-top:.2rem}
svg.figure{display:block;width:100%;height:auto;max-width:34rem;font-family:inherit}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.95rem;
margin:.6rem 0 1rem}
caption{text-align:left;font-weight:600;padding:.4rem 0}
caption span{font-weight:400;color:var(--muted)}
th,td{text-align:right;padding:.42rem .5rem;border-bottom:1px solid var(--line);vertical-align:top;
line-height:1.3}
th:first-child,td:first-child{text-align:left;padding-left:0}
th:last-child,td:last-child{padding-right:0}
thead th{color:var(--muted);font-weight:600;font-size:.82rem;vertical-align:bottom}
tbody th{font-weight:600}
tr.default th{font-weight:700}
.mark{display:inline-block;font-weight:600;font-size:.72rem;line-height:1.2;color:var(--accent);
border:1px solid currentColor;border-radius:.6rem;padding:0 .4rem;margin-left:.35em;vertical-align:.1em}
td small{display:block;color:var(--muted);font-size:.8rem}
.swatch{display:inline-block;width:1.7em;height:.7em;margin-right:.45em;vertical-align:.02em}
.swatch line{stroke-width:3}
.legend{display:flex;flex-wrap:wrap;gap:.35rem .5rem;margin:.8rem 0;padding:0;border:0;font-size:.9rem}
.legend label{display:inline-flex;align-items:center;border:1px solid var(--line);border-radius:2rem;
padding:.12rem .7rem;
cursor:pointer}
.legend input{position:absolute;opacity:0;width:0;height:0}
.legend label:has(:checked){border-color:var(--ink)}
.legend label:has(:focus-visible){outline:2px solid var(--accent);outline-offset:2px}
.wide{overflow-x:auto}
.wide table{font-size:.82rem}
.wide td,.wide th{text-align:left;padding-left:0}
details{border-top:1px solid var(--line);margin:0}
details:last-of-type{border-bottom:1px solid var(--line)}
.folded{margin-top:2.6rem}
summary{cursor:pointer;padding:.75rem 0}
summary h2{display:inline;margin:0;font-size:1.1rem}
summary:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.15rem 1.2rem;margin:.8rem 0;font-size:.9rem}
dt{color:var(--muted)}
dd{margin:0;overflow-wrap:anywhere}
@media (max-width:36rem){main{padding:1.6rem 1rem 3rem}h2{margin-top:2.4rem}table{font-size:.82rem}
.results tr{display:grid;grid-template-columns:1.35fr 1.1fr 1fr .95fr;border-bottom:1px solid var(--line)}
.results th,.results td{border:0;padding:.1rem .3rem .3rem 0;text-align:left}
.results tbody th{grid-column:1/-1;padding:.4rem 0 .1rem}.results thead th:first-child{display:none}
thead th,td small{font-size:.72rem}
dl{grid-template-columns:1fr;gap:0}dd{margin-bottom:.4rem}.formula{grid-template-columns:1fr;gap:0;font-size:.8rem}
.formula b:not(:first-child){margin-top:.6rem}}
@media print{body{background:#fff}.legend input{display:none}h2{break-after:avoid}
figure,table{break-inside:avoid}}
"""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<title>{{ title }}</title>
<style>{{ style|safe }}
{% for method in methods %}
body:has(#pick-{{ loop.index }}:checked) .curves .curve:not(.{{ looks[method].name }}){opacity:.13}
{% endfor %}
</style>
</head>
<body>
{% macro name(method) %}{{ swatch(looks[method])|safe }}{{ method }}{% if method == default %}
 <span class="mark">default</span>{% endif %}{% endmacro %}
{% macro panels(figures, kind="") %}<div class="panels {{ kind }}">
{% for figure in figures %}<figure>{{ figure.svg|safe }}
{% if figure.caption %}<figcaption>{{ figure.caption }}</figcaption>{% endif %}</figure>
{% endfor %}</div>{% endmacro %}
<main>
<p class="eyebrow">hotrain</p>
<h1>{{ title }}</h1>
{% for sentence in findings %}<p class="lead">{{ sentence }}</p>
{% endfor %}

<h2>Bytes kept and accuracy</h2>
{% if tradeoffs %}
<p>Left is less memory, up is more accurate. {{ noise }}</p>
{{ panels(tradeoffs) }}
{% endif %}
{% for model in models %}
<table class="results">
<caption>{{ model.label }}{% if model.description %} <span>· {{ model.description }}</span>{% endif
%}</caption>
<thead><tr><th scope="col">method</th><th scope="col">test accuracy</th><th scope="col">bytes kept</th>
<th scope="col">bit operations</th><th scope="col">step</th></tr></thead>
<tbody>
{% for line in table if line.model == model.name %}
<tr{% if line.method == default %} class="default"{% endif %}><th scope="row">{{ name(line.method) }}</th>
<td>{% if line.accuracy is none %}failed{% else %}{{ "%.2f"|format(line.accuracy) }} %
<small>{% if line.spread is not none %}±{{ "%.2f"|format(line.spread) }} between seeds<br>{% endif %}
{{ line|gap }}
{% if line.failed %} {{ line.failed }} of {{ line.seeds }} failed{% endif %}</small>{% endif %}</td>
<td>{{ line.saved_bytes|bytes }}<small>{{ line.saved_ratio|ratio }}</small></td>
<td>{{ line.bit_ops|operations }}<small>{{ line.bit_ops_ratio|ratio }}</small></td>
<td>{{ line.step_ms|milliseconds }}<small>{{ line.step_ratio|ratio }}</small></td></tr>
{% endfor %}
</tbody>
</table>
{% endfor %}
<p class="muted">Below a number: for accuracy, its gap to exact in points ± the noise; for the others, the ratio
to exact.</p>

<h2>What this means</h2>
{% if standing %}<p>{{ standing }}</p>{% endif %}
<p>Bytes kept are what PyTorch's autograd holds between forward and backward. They grow with the batch: fewer bytes
leave room for more images. <code class="line">hotrain memory MODEL --fit 24GB</code> says how many, for a recipe or
a timm model.</p>
{% if memory %}
<h3>Where the bytes are</h3>
<p>A tensor that several operators save is counted once, with the first of them. So a layer whose input the norm or
activation before it keeps as well shows no bytes of its own.</p>
{{ panels(memory) }}
{% endif %}

{% if curves %}
<h2>Learning curves</h2>
<p>Test accuracy after each epoch and mean training loss of each epoch. Pick a method to bring it forward.</p>
<form><fieldset class="legend" aria-label="method shown in front">
<label><input type="radio" name="pick" checked>all</label>
{% for method in methods %}
<label><input type="radio" name="pick" id="pick-{{ loop.index }}">{{ name(method) }}</label>
{% endfor %}
</fieldset></form>
{{ panels(curves, "curves") }}
{% endif %}

<div class="folded">
{% if described or formula %}
<details>
<summary><h2>The methods</h2></summary>
{% if same_forward %}<p>The forward pass is the same in every method.</p>{% endif %}
{% if described %}
<dl>
{% for method, text in described %}<dt>{{ name(method) }}</dt><dd>{{ text|code|safe }}</dd>
{% endfor %}
</dl>
{% endif %}
{% if formula %}
<div class="formula" role="group" aria-label="formulas of exact and HOT">
{% for label, row in formula %}<b>{{ label }}</b>{% for path in row %}<span>{{ path }}</span>{% endfor %}
{% endfor %}
</div>
<p class="muted">H rotates 16 output channels at a time: it loses nothing and spreads outliers before they are
rounded. P keeps 8 of 16 Walsh coefficients along the tokens. Q4 and Q8 round to 4 and 8 bits.</p>
{% endif %}
</details>
{% endif %}
{% if layers %}
<details>
<summary><h2>What ran in each layer</h2></summary>
<p>Read off the model after its last step.</p>
{% for part in layers %}
<div class="wide" tabindex="0"><table>
<caption>{{ part.label }}</caption>
<thead><tr><th scope="col">method</th>{% for column in part.columns %}<th scope="col">{{ column }}</th>{%
endfor %}</tr></thead>
<tbody>
{% for method, cells in part.rows %}
<tr><th scope="row">{{ name(method) }}</th>{% for cell in cells %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table></div>
{% endfor %}
</details>
{% endif %}
{% if spectra %}
<details>
<summary><h2>Energy by sequency</h2></summary>
<p>How much of a tensor's energy is in the lowest sequencies of the Walsh basis along 16 tokens. Line: the
median layer. Band: from the lowest to the highest layer. What a low-pass drops is the energy above it.</p>
{{ panels(spectra) }}
</details>
{% endif %}
</div>

<h2>How it was measured</h2>
<ul>
{% for note in meta.get("notes", []) %}<li>{{ note|code|safe }}</li>
{% endfor %}
<li>Bytes are counted by saved-tensor hooks in a real training forward, not computed from a formula.</li>
<li>Bit operations are counted from the layers' shapes: a product of a-bit by b-bit operands counts a·b a
multiply-accumulate, transforms and rounding included. They are not a time.</li>
</ul>
<dl>
{% for name, value in conditions %}<dt>{{ name }}</dt><dd>{% if name in ("command", "commit") %}<code>{{
value }}</code>
{% else %}{{ value }}{% endif %}</dd>
{% endfor %}
</dl>
</main>
</body>
</html>
"""
