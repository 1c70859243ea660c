"""The page of the report: style sheet and template. Plain HTML and CSS; the figures come in as inline SVG."""

FORMULA = (
    ("exact", "g_x = g_y w", "g_w = g_yᵀ x", "saved: x"),
    ("HOT", "g_x = Q4(g_y H) Q4(Hᵀ w)", "g_w = Q8(P g_y)ᵀ Q8(P x)", "saved: Q8(P x)"),
)
"""The method's two gradient paths and what is kept, against exact's."""

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
.key{display:inline-block;width:.72em;height:.72em;border-radius:50%;margin-right:.35em}
.key.diamond{border-radius:0;transform:rotate(45deg) scale(.85)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.15rem 1.2rem;margin:.8rem 0;font-size:.9rem}
dt{color:var(--muted)}
dd{margin:0;overflow-wrap:anywhere}
@media (max-width:36rem){main{padding:1.6rem 1rem 3rem}h2{margin-top:2.4rem}table{font-size:.82rem}
th,td{padding:.4rem .22rem}thead th,td small{font-size:.72rem}.swatch{display:block;margin:.1em 0 .2em}
dl{grid-template-columns:1fr;gap:0}dd{margin-bottom:.4rem}.formula{grid-template-columns:1fr;gap:0;font-size:.8rem}
.formula b:not(:first-child){margin-top:.6rem}td{white-space:nowrap}}
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
body:has(#pick-{{ loop.index }}:checked) .curves .curve:not(.{{ method.name|css }}){opacity:.13}
{% endfor %}
</style>
</head>
<body>
<main>
<p class="eyebrow">hotrain</p>
<h1>{{ title }}</h1>
{% if meta.get("abstract") %}<p class="lead">{{ meta["abstract"] }}</p>{% endif %}
{% if findings %}
<ul class="lead">
{% for sentence in findings %}<li>{{ sentence }}</li>
{% endfor %}
</ul>
{% endif %}
<div class="formula" role="group" aria-label="the method">
{% for row in formula %}<b>{{ row[0] }}</b>{% for path in row[1:] %}<span>{{ path }}</span>{% endfor %}
{% endfor %}
</div>
<p class="muted">The forward pass is the same in every method. H rotates 16 output channels (lossless; it
spreads
outliers before rounding to 4 bits). P keeps 8 of 16 Walsh coefficients along the tokens;
<em>hot-unbiased</em> keeps 4
of them fixed and draws the other 4, scaled so that the expected weight gradient is exact.</p>

<h2>What each method costs and reaches</h2>
{% for model in models %}
<table>
<caption>{{ model.label }}{% if model.description %} <span>· {{ model.description }}</span>{% endif
%}</caption>
<thead><tr><th scope="col">method</th><th scope="col">test accuracy</th><th scope="col">bytes kept</th>
<th scope="col">bit operations</th><th scope="col">step</th></tr></thead>
<tbody>
{% for line in table if line.model == model.name %}
<tr><th scope="row">{{ swatch(line.method)|safe }}{{ line.method }}</th>
<td>{% if line.accuracy is none %}failed{% else %}{{ "%.2f"|format(line.accuracy) }} %
<small>{% if line.spread is not none %}±{{ "%.2f"|format(line.spread) }}{% endif %}
{% if line.gap is not none %} {{ line.gap|signed }}{% endif %}
{% if line.failed %} {{ line.failed }} of {{ line.seeds }} failed{% endif %}</small>{% endif %}</td>
<td>{{ line.saved_bytes|bytes }}<small>{{ line.saved_ratio|ratio }}</small></td>
<td>{{ line.bit_ops|operations }}<small>{{ line.bit_ops_ratio|ratio }}</small></td>
<td>{{ line.step_ms|milliseconds }}<small>{{ line.step_ratio|ratio }}</small></td></tr>
{% endfor %}
</tbody>
</table>
{% endfor %}
<p class="muted">Small print under a number: accuracy's standard deviation over the seeds (±) and its gap to
exact,
paired by seed, in points; for the other columns, the ratio to exact.</p>

{% if curves %}
<h2>Learning curves</h2>
<p>Test accuracy after each epoch and mean training loss of each epoch. Pick a method to bring it forward.</p>
<form><fieldset class="legend" aria-label="method shown in front">
<label><input type="radio" name="pick" checked>all</label>
{% for method in methods %}
<label><input type="radio" name="pick" id="pick-{{ loop.index }}">{{ swatch(method.name)|safe }}{{ method.name
}}</label>
{% endfor %}
</fieldset></form>
<div class="panels curves">
{% for svg in curves %}<figure>{{ svg|safe }}</figure>
{% endfor %}
</div>
{% endif %}

{% if memory %}
<h2>Where the bytes are</h2>
<p>What autograd keeps alive between forward and backward of one batch, counted from the distinct storages behind
its saved tensors, by the operator that saved them first. Only the converted layers' own share and that of
the ReLUs beside them shrink (a ReLU needs a bit an entry); norms, attention and other activations keep what they
kept.</p>
<p>{% for method in ("exact", "hot-unbiased") %}<span style="white-space:nowrap;margin-right:1.2em"><span
class="key"
style="border-radius:.15em;background:var(--m-{{ method }})"></span>{{ method }}</span>{% endfor %}</p>
<div class="panels">
{% for svg in memory %}<figure>{{ svg|safe }}</figure>
{% endfor %}
</div>
{% endif %}

{% if spectra %}
<h2>Energy by sequency</h2>
<p>How much of each tensor's energy lies at each sequency of the 16-token Walsh basis: line, the median
layer; band, from
the lowest to the highest layer. A low-pass pays where the curve falls to the right, and what it drops there
is the bias
that <em>hot-unbiased</em> removes.</p>
<div class="panels">
{% for svg in spectra %}<figure>{{ svg|safe }}</figure>
{% endfor %}
</div>
{% endif %}

{% if choices or surfaces %}
<h2>Outliers, and the scale each layer gets</h2>
<p>LQS asks of every layer whether 4-bit rounding of its output gradient errs less than half as much with one
scale a
token as with one scale for the whole tensor.</p>
{% endif %}
{% if surfaces %}
<div class="panels">
{% for surface in surfaces %}<figure>{{ surface.svg|safe }}<figcaption>{{ surface.caption }}</figcaption></figure>
{% endfor %}
</div>
{% if meta.get("surface_note") %}<p class="muted">{{ meta["surface_note"] }}</p>{% endif %}
{% endif %}
{% if choices %}
<h3>Error ratio of every converted layer</h3>
<p><span style="white-space:nowrap;margin-right:1.2em"><span class="key"
style="background:var(--first)"></span>a scale
a token</span> <span style="white-space:nowrap"><span class="key diamond"
style="background:var(--second)"></span>one
scale a tensor</span></p>
<div class="panels">
{% for svg in choices %}<figure>{{ svg|safe }}</figure>
{% endfor %}
</div>
{% endif %}

<h2>What is measured here, and what is not</h2>
<ul>
{% for note in meta.get("notes", []) %}<li>{{ note|code|safe }}</li>
{% endfor %}
<li>Bytes kept are measured by saved-tensor hooks in a real training forward, not computed from a
formula.</li>
<li>Bit operations are counted from the layers' shapes (products of a-bit by b-bit operands count a·b a
multiply-accumulate), transforms and rounding included. They are not a time.</li>
</ul>
<h3>Conditions</h3>
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
