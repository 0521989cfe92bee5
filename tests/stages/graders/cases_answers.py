"""Answers and labels of mathematics, and whether `math` should call them equal: a line each, `answer || label`.

What is under WRONG is what a learner would find if it were taken for right.
"""

from __future__ import annotations

RIGHT = {
    "letters and words": r"""
east || \text{east}
ABC || ABC
\text{Tuesday} || Tuesday
ab || ba
xy || yx
yes || Yes
red || red
\mathrm{east} || east
TRUE || True
\text{(B)} || B
(B) || B
\text{neither} || neither
\text{June 20} || June 20
Evelyn || \text{Evelyn}
NOON || noon
A,B || B,A
""",
    "negations and what is hidden": r"""
\sqrt{42^2} || 42
42+0 || 42
|42| || 42
\lceil 41.5\rceil || 42
-(-42) || 42
""",
    "units": r"""
5\text{ m} || 5
5 || 5\text{ m}
5 cm || 5
5\text{ cm} || 5\text{ cm}
5\text{cm} || 5\,\mathrm{cm}
5\text{ meters} || 5\text{ m}
5 \text{ dollars} || \$5
50\% || 50
5\text{ cm}^2 || 5\text{ cm}^2
5\text{ apples} || 5
60\text{ mph} || 60
12\text{ square units} || 12
12\text{ units}^2 || 12
5\text{ million} || 5000000
30^\circ || 30
30\degree || 30^\circ
30\degree || 30
30^\circ C || 30
1,000\text{ meters} || 1000
\$1{,}234.50 || 1234.5
5\text{ ft} || 5\text{ feet}
5\text{ in} || 5\text{ inches}
5\,\text{m/s} || 5\text{ m}/\text{s}
15\text{ cm}^2 || 15\text{ square centimeters}
\frac{1}{2}\text{ hour} || \frac12
5 km || 5
""",
    "equations": r"""
2+2=4 || 4
x=2+2=4 || 4
x=5 || 5
5 || x=5
x=7 || x=7
7=x || 7
f(x)=x^2 || x^2
x^2 || f(x)=x^2
y=2x+1 || 2x+1
y=2x+1 || 2x-y+1=0
a_{10}=5 || 5
\angle ABC = 30^\circ || 30^\circ
|AB|=5 || 5
P(A)=0.5 || \frac{1}{2}
AB=5 || 5
\frac{1}{2}=0.5 || 0.5
x=1,y=2 || 1,2
x=1,y=2 || (1,2)
x=1,2 || 1,2
x \in \{1,2\} || \{1,2\}
x\in(1,2) || (1,2)
m+n=42 || 42
y = \frac{1}{2}x + 3 || y=\frac{x}{2}+3
2x+3y=6 || 3y+2x=6
2x+3y=6 || 4x+6y=12
x^2+y^2=25 || y^2+x^2=25
2x+3y<6 || 6>3y+2x
2x+3y<6 || 4x+6y<12
-x<1 || x>-1
x=5\text{ cm} || 5
\text{Area}=12\text{ cm}^2 || 12
A = \pi r^2 = 25\pi || 25\pi
r=5,\theta=\frac{\pi}{3} || (5,\frac{\pi}{3})
(x,y)=(1,2) || (1,2)
n=2k || 2k
\frac{a}{b}=\frac{1}{2} || \frac12
=5 || 5
""",
    "rounding": r"""
0.5 || \frac{1}{2}
0.50 || \frac12
0.125 || \frac18
2.0 || 2
0.\overline{3} || \frac13
0.\overline{12} || \frac{4}{33}
0.1\overline{6} || \frac16
6.02\times10^{23} || 6.02e23
6.02\cdot 10^{23} || 602000000000000000000000
10^{-3} || 0.001
1e-3 || 0.001
""",
    "thousands": r"""
32,349 || 32349
32{,}349 || 32349
32\,349 || 32349
32,\!349 || 32349
1{,}234{,}567 || 1234567
1,234.5 || 1234.5
10,000 || 10^4
100{,}000 || 10^5
""",
    "notation and functions": r"""
1e6 || 1000000
1e6 || 10^6
1.5e3 || 1500
1E6 || 1000000
1\times 10^6 || 1000000
1.5\cdot10^{3} || 1500
3{:}30 || 3:30
3:30 || 3{:}30
3:30 || 3:30\text{ p.m.}
2:1 || 2:1
2:4 || 1:2
e^{i\pi} || -1
i^2 || -1
\sin 30^\circ || \frac12
\sin 30^\circ || 0.5
\cos 60^\circ || \frac{1}{2}
\varnothing || \emptyset
\emptyset || \varnothing
\{\} || \emptyset
\tan 45^{\circ} || 1
\sin^2 x+\cos^2 x || 1
\sin 2x || 2\sin x\cos x
\cos(2x) || 1-2\sin^2 x
e^{i\pi}+1 || 0
(1+i)^2 || 2i
\frac{1}{i} || -i
3+4i || 4i+3
\sqrt{-4} || 2i
\ln e || 1
\log_2 8 || 3
\log 100 || 2
\ln 2+\ln 3 || \ln 6
\arctan 1 || \frac{\pi}{4}
\arcsin\frac12 || \frac{\pi}{6}
e^2 || e^{2}
e^x || e^{x}
\exp(x) || e^x
\sum_{k=1}^{n} k || \sum_{k=1}^n k
\sum_{k=1}^{n} (k+1) || \sum_{k=1}^n (1+k)
\sum_{i=1}^{n} i || \sum_{k=1}^n k
1+\sum_{k=1}^{n} a_k || \sum_{k=1}^n a_k+1
\sum_{k=1}^{n} a_k+\sum_{k=1}^m b_k || \sum_{k=1}^m b_k+\sum_{k=1}^{n} a_k
\int x\,dx || \int x dx
\int_0^1 f(x) dx + 1 || 1+\int_0^1 f(x)dx
\lim_{x\to 0}\frac{\sin x}{x} || \lim_{x \to 0} \frac{\sin x}{x}
\frac{\pi}{4} || 45^\circ
(x-1)(x+1) || x^2-1
\frac{1}{-2} || -\frac12
\frac{3\pi}{2} || 1.5\pi
2^{-1} || 0.5
\sqrt{50} || 5\sqrt{2}
\frac{\sqrt{2}}{2} || \frac{1}{\sqrt{2}}
10\% || 0.1
x=-1\text{ or }x=3 || -1,3
x=3,-1 || -1,3
-1\text{ and }3 || \{-1,3\}
(-1,3) || -1,3
x=1; y=2 || (1,2)
\text{(A)} || A
\text{A} || (A)
\mathrm{(A)} || A
\frac{n(n+1)}{2} || \frac{n^2+n}{2}
(-1)^{n+1} || -(-1)^n
2^{n+1} || 2\cdot 2^n
\ln(x^2) || 2\ln x
\sec x || \frac{1}{\cos x}
\tan x || \frac{\sin x}{\cos x}
e^{i\theta} || \cos\theta+i\sin\theta
a_1+a_2 || a_2+a_1
\alpha+\beta || \beta+\alpha
\frac{x^2}{2}+C || \frac{1}{2}x^2+C
f(x)+1 || 1+f(x)
1+\int_0^1 f(x)\,dx || \int_0^1 f(x)dx+1
\int_0^1 f(t)dt || \int_0^1 f(x)dx
\lim_{n\to\infty} a_n+1 || 1+\lim_{n \to \infty} a_n
\prod_{k=1}^n (1+x_k) || \prod_{j=1}^n(x_k+1)
\sum_{k=1}^{n} \frac1k || \sum_{k=1}^{n} \frac{1}{k}
7 3/4 || 31/4
7\frac34 || 7.75
-1\frac{1}{2} || -1.5
3/4 || 0.75
6/8 || 3/4
\frac{6}{8} || \frac{3}{4}
110_2 || 110_{2}
""",
    "collections, matrices, intervals": r"""
\{1,2\} || \{2,1\}
{1,2} || \{1,2\}
\left\{1,2\right\} || \{1,2\}
1,2 || \{1,2\}
1,2 || 2,1
\{1,2,2\} || \{1,2\}
\lbrace 1,2\rbrace || \{1,2\}
\begin{pmatrix}1\\2\end{pmatrix} || \begin{pmatrix} 1 \\ 2 \end{pmatrix}
\begin{pmatrix}1\\2\end{pmatrix} || \begin{bmatrix}1\\2\end{bmatrix}
\begin{pmatrix}\frac12\\2\end{pmatrix} || \begin{pmatrix}0.5\\2\end{pmatrix}
\begin{matrix}1&2\\3&4\end{matrix} || \begin{pmatrix}1&2\\3&4\end{pmatrix}
\dbinom{5}{2} || \binom{5}{2}
\dbinom{5}{2} || 10
\tbinom{n}{2} || \frac{n(n-1)}{2}
\binom{5}{3} || \binom52
\binom{n}{k} || \binom{n}{n-k}
(1,\infty) || (1,+\infty)
(-\infty,1)\cup(2,\infty) || (-\infty, 1) \cup (2, \infty)
(2,\infty)\cup(-\infty,1) || (-\infty,1)\cup(2,\infty)
1<x<2 || (1,2)
x>2 || (2,\infty)
x>2 || 2<x
x\ge 2 || x\geq 2
[1,2) || 1\le x<2
\mathbb{R} || (-\infty,\infty)
\mathbb{R} || \mathbb R
(\sin x+\cos x)^{20} || (\cos x+\sin x)^{20}
6:00 \text{ PM} || 6:00
\frac{x^2-1}{x-1} || x+1
|x| || \sqrt{x^2}
\sqrt{x^2} || |x|
x^{0.5} || \sqrt{x}
n! || n(n-1)!
123_8 || 123
123_8 || 123_{8}
1011_2 || 1011_{2}
x_1 || x_{1}
5, || 5
5. || 5
+5 || 5
05 || 5
$5$ || 5
\$5 || 5
\boldsymbol{5} || 5
\mathbf{5} || 5
\textbf{5} || 5
\text{5} || 5
\color{red}5 || 5
{5} || 5
((5)) || 5
(5) || 5
[5] || 5
5% || 5
5% || 0.05
0.05 || 5\%
0.5% || 0.005
50\% || \frac12
\left(-\infty,3\right] || (-\infty, 3]
x\le 3 || (-\infty,3]
3\ge x || (-\infty,3]
-1\le x\le 3 || [-1,3]
x \in [-1,3] || -1\le x\le 3
(1,3)\cup(5,7) || (5,7)\cup(1,3)
x<1\text{ or }x>3 || (-\infty,1)\cup(3,\infty)
\mathbb{R}\setminus\{0\} || \mathbb{R} \setminus \{0\}
\begin{bmatrix}1&2\\3&4\end{bmatrix} || \begin{pmatrix}1&2\\3&4\end{pmatrix}
\begin{array}{cc}1&2\\3&4\end{array} || \begin{pmatrix}1&2\\3&4\end{pmatrix}
\left(\begin{array}{c}1\\2\end{array}\right) || \begin{pmatrix}1\\2\end{pmatrix}
\begin{pmatrix} -7 \\ 16 \\ 5 \end{pmatrix} || \begin{pmatrix}-7\\16\\5\end{pmatrix}
\{(1,2),(3,4)\} || \{(3,4),(1,2)\}
(1,2),(3,4) || (3,4),(1,2)
(1,2),(3,4) || \{(1,2),(3,4)\}
1,2,3 || 3,2,1
\pm 2 || 2,-2
\pm 2 || -2,2
1\pm\sqrt2 || 1+\sqrt2,1-\sqrt2
x=\pm\sqrt{3} || \pm\sqrt3
""",
}

WRONG = {
    "letters and words": r"""
ABC || BCA
east || seat
\text{east} || seat
abc || cab
AB || BA
no || on
\text{no} || \text{on}
\text{odd} || \text{even}
June 20 || June 21
20 June || June 20
\text{true} || \text{false}
live || evil
AC || CA
\triangle ABC || \triangle BCA
\overline{AB} || \overline{BA}
\angle ABC || \angle CBA
stop || spot
N || Z
\text{line 1} || \text{line 2}
A, C || A, B
""",
    "negations and what is hidden": r"""
\neq 42 || 42
\not 42 || 42
\phantom{42} || 42
x \neq 42 || 42
x\ne 42 || 42
\not= 42 || 42
\lnot 42 || 42
\neg 42 || 42
\text{not } 42 || 42
\hphantom{42} || 42
\cancel{42} || 42
\sout{42} || 42
not 42 || 42
\phantom{1}42 || 42
≠ 42 || 42
x≠42 || x=42
x>42 || 42
x<42 || 42
x\approx 42 || 42
>42 || 42
\geq 42 || 42
\pm 42 || 42
\sim 42 || 42
42? || 42
\bar{42} || 42
42\text{ or }43 || 42
42,43 || 42
\{42,43\} || 42
42\vee43 || 42
42 / 43 || 42
42\ldots || 42
42... || 42
\overline{42} || 42
\hat{42} || 42
\overset{?}{42} || 42
42^* || 42
42' || 42
*42 || 42
@42 || 42
42;43 || 43
43\to 42 || 42
42\neq 43 || 42
42\ne43 || 43
]42[ || 42
42\,43 || 42
4\,2 || 42
x \neq 3 || x=3
x>3 || x\geq3
x\not=3 || x=3
\neg A || A
\lnot p || p
\sim p || p
42\text{ is wrong} || 42
42\text{ but not }43 || 42
\text{not }42 || 42
\text{about }42 || 42
-42 || 42
\overline{x} || x
\bar z || z
42! || 42
\infty || 42
\emptyset || 0
0 || \emptyset
\{0\} || \emptyset
""",
    "units": r"""
5 m || 5 km
5\text{ m} || 5\text{ km}
5 \text{ hours} || 5 \text{ minutes}
5\text{ cm}^2 || 5\text{ cm}^3
5\text{ apples} || 5\text{ oranges}
5 km || 5 m
5 s || 5 h
5 dollars || 5 cents
5\text{ million} || 5
5\text{ thousand} || 5
5\text{ dozen} || 5
30^\circ || 30\text{ radians}
1{,}000\text{ km} || 1000\text{ m}
5\text{ m/s} || 5\text{ km/h}
72^\circ F || 72^\circ C
15\text{ square cm} || 15\text{ cm}
5\text{ kg} || 5\text{ g}
5\text{ years} || 5\text{ months}
5 miles || 5 km
""",
    "equations": r"""
42=43 || 43
42=43 || 42
7 = 11a+c || 11a+c
11a+c || 7=11a+c
x = 5 || y = 5
1=2=3 || 3
x=3=4 || 4
\frac{1}{2}=0.6 || 0.6
41+1=42=43 || 43
2x+3y=6 || 2x+3y=7
x^2+y^2=25 || 25
25 || x^2+y^2=25
x<y || y<x
-x<1 || x<-1
\pi=3 || 3
5=2 || 2
x= || 5
""",
    "rounding": r"""
0.333333 || \frac{1}{3}
0.3333333333 || \frac{1}{3}
\frac{1}{3} || 0.333333
3.141592653589793 || \pi
1.41421356 || \sqrt{2}
1.4142135623730951 || \sqrt2
0.9999999 || 1
1.0000001 || 1
1e-9 || 0
0.0000001 || 0
1e-20 || 0
0.333... || \frac13
0.16 || \frac16
0.1666666667 || \frac{1}{6}
2.718281828 || e
""",
    "thousands": r"""
32, 349 || 32349
32 349 || 32349
32349 || 32, 349
3,2349 || 32349
1,2,3 || 123
(1,234) || 1234
1,234 || 1.234
12,34 || 1234
""",
    "notation and functions": r"""
3:31 || 3:30
3:30 || 330
2:1 || 1:2
3+4i || 3-4i
\sum_{k=1}^{10} k || 55
\sum_{k=1}^{n} k || \sum_{k=1}^n k^2
\sum_{k=1}^{n} k || \sum_{k=0}^{n-1} k
\int_0^1 x^2 dx || \frac13
\prod_{k=1}^{n} k || n!
(3,-1) || -1,3
\frac{n(n+1)}{2} || \frac{n(n-1)}{2}
\ln x || \log x
\cos x || \sin x
a_n || a_m
\alpha || a
\theta || \phi
x+C || x+K
f(x) || g(x)
P(A\cap B) || P(B)
\int_0^1 x dx || \int_0^2 x dx
\sum_{k=1}^{n}\frac{1}{k} || \sum_{k=1}^{n}\frac{1}{k^2}
2\frac12 || 1
110_2 || 110_3
110_2 || 6
""",
    "collections, matrices, intervals": r"""
(1,2) || (2,1)
\{1,2,3\} || \{1,2\}
(1,2) || \{1,2\}
[1,2] || (1,2)
\begin{pmatrix}1&2\\3&4\end{pmatrix} || \begin{pmatrix}1&2\\3&5\end{pmatrix}
\begin{pmatrix}1\\2\end{pmatrix} || \begin{pmatrix}2\\1\end{pmatrix}
\begin{pmatrix}1&2\end{pmatrix} || \begin{pmatrix}1\\2\end{pmatrix}
\binom{n}{2} || \binom{n}{3}
x>2 || x<2
x>2 || x\ge2
\mathbb{Z} || \mathbb{N}
\sin^{30} x || \cos^{30} x
\sin^{30} x+\cos^{30} x || 1
\sqrt{x^2} || x
x^2 || x^3
101_2 || 5
x_1 || x_2
12 || 21
1 2 || 12
5\% || 500
\begin{vmatrix}1&2\\3&4\end{vmatrix} || \begin{pmatrix}1&2\\3&4\end{pmatrix}
\begin{pmatrix}1\\2\end{pmatrix} || \begin{pmatrix}1\\2\\3\end{pmatrix}
(1,2),(3,4) || (2,1),(3,4)
1,2,3 || 1,2,4
\pm2 || 2
2 || \pm 2
""",
}


def pairs() -> list[tuple[str, str, int]]:
    """(answer, label, expected score)"""
    found = []
    for score, table in ((1, RIGHT), (0, WRONG)):
        for block in table.values():
            for line in block.strip().splitlines():
                answer, _, label = line.partition(" || ")
                found.append((answer, label, score))
    return found
