"""Normalises text for the full-text search: indexed text and queries take the same form.

    indexed(text)      the text with separated words, for the index
    query(words)       the index query for words that a user typed
    length_of_last     the length of the last word of a text in the index

The index splits text into words at spaces and punctuation, but several scripts write whole sentences without either.
This module makes each of their characters a word, and searches for several as a phrase: a search for 東京 finds
東京タワー. Forms that Unicode calls compatible are equal: full width and half width, ligatures, a letter with its
accent in one code point or in two. A letter also equals what people type for it: Strasse and Straße, Lodz and Łódź,
елка and ёлка, カラ and から, 12 and १२; München is both Munchen and Muenchen. A word with punctuation inside is found
without it, too, and the reverse: dont and Don't, acdc and AC/DC, 10000 and 10,000.

The index knows letters and digits only. So this module repeats each symbol, and each word that ends in +, #, ♭ or %
or begins with a dot, after the text, in private letters: 🔥, C++, 50% and .NET are words, and `win🔥goal` still has the
words win and goal in a row.
"""

from __future__ import annotations

import re
import unicodedata
from itertools import chain, groupby

from quota.errors import UsageError

MAX_INDEXED = 100_000
"""The index covers this many characters of one text: several times the length that upstream allows."""

MAX_WORD = 64
"""The index covers this many characters of a word that ends in +, #, ♭ or %."""

MAX_WORDS = 32
MAX_CHARACTERS = 500
"""The maximum in one search. Longer phrases are slow: 400 took 5 s on a store that repeats its characters."""

_UNSPACED = (
    "["
    "\u0e00-\u0eff"  # Thai, Lao
    "\u1000-\u109f\ua9e0-\ua9ff\uaa60-\uaa7f"  # Myanmar
    "\u1780-\u17ff"  # Khmer
    "\u1950-\u19df\u1a20-\u1aaf\uaa80-\uaadf"  # Tai Le, New Tai Lue, Tai Tham, Tai Viet
    "\u1100-\u11ff\ua960-\ua97f\uac00-\ud7ff"  # Hangul: it has spaces between words, but not before particles
    "\u2e80-\u2fdf\u3005-\u3007\u3021-\u3029\u3031-\u303c\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # Han
    "\u3040-\u318f\u31a0-\u31bf\u31f0-\u31ff"  # Kana, Bopomofo
    "\ua000-\ua4cf"  # Yi
    "\U0001aff0-\U0001b16f\U00020000-\U0003ffff"  # more Kana and Han
    "]+"
)
"""Matches text in a script that does not mark the ends of words."""

_ACCENTS = (
    "["
    "\u0300-\u036f\u0483-\u0489\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f"  # any script's
    "\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7"  # Hebrew points
    "\u0610-\u061a\u064b-\u065f\u0670\u06d6-\u06dc\u06df-\u06e4\u06e7\u06e8\u06ea-\u06ed\u0640"  # Arabic vowels
    "\u093c\u0a3c"  # the dot of Devanagari and Gurmukhi
    "\ufe00-\ufe0f\U000e0100-\U000e01ef"  # variants of a glyph: the heart in colour or not
    "\u00ad\u061c\u200b\u200d-\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff"  # how a line breaks and runs: invisible
    "]+"
)
"""Marks that a writer may omit without changing the word. The vowel signs of Hindi or Thai are not among them."""

_NON_JOINER = "(?<![\u0600-\u06ff])\u200c"
"""Matches a non-joiner of Indian scripts, which a writer may omit. In Persian it parts words."""

_NOT_LATIN = "[\u0370-\u1dff\u1f00-\u1fff]+"
"""Matches text in scripts whose accents the index does not know."""

_NEW_CASES = "[\u13f8-\u13fd\u1c80-\u1cbf\uab70-\uabbf\U000104b0-\U0001e943]+"
"""Matches letters whose capitals the index does not know."""

_DIGIT = r"[^\D\x00-\x7f]"
"""Matches a digit of another script: Arabic and Persian ones look alike, and many people type 0 to 9."""

_TYPED = str.maketrans(
    {"ß": "ss", "ẞ": "SS", "æ": "ae", "Æ": "AE", "ǽ": "ae", "Ǽ": "AE", "œ": "oe", "Œ": "OE", "þ": "th", "Þ": "TH"}
    | dict(zip("øØǿǾłŁđĐħĦŧŦðÐəƏɓƁɗƊƙƘƴƳɔƆɛƐ\u0131ŋŊґҐ♯", "oOoOlLdDhHtTdDeEbBdDkKyYoOeEinN\u0433Г#", strict=True))
    | dict(zip("ɖƉƒƑɠƓɣƔɨƗɩƖɲƝɵƟǥǤʉɄʊƱʋƲǝƎƶƵ٪", "dDfFgGgGiIiInNoOgGuUuUvVeEzZ%", strict=True))
    | dict(zip("қҚғҒңҢҳҲҷҶҗҖәӘөӨүҮұҰһҺҡҠҫҪҙҘ", "кКгГнНхХчЧжЖаАоОуУуУхХкКсСзЗ", strict=True))  # Kazakh, Tajik, Tatar
    | {chr(0xD7A + n): f"{letter}\u0d4d" for n, letter in enumerate("ണനരലളക")}  # Malayalam
    | {chr(n): str(int(unicodedata.numeric(chr(n)))) for n in (*range(0x24EB, 0x2500), *range(0x2776, 0x2794))}  # ❶
    | dict.fromkeys("\u02b9\u02bb\u02bc\u02bd\u02be\u02bf", "'")  # Hawai\u02bbi, o\u02bbzbek
    | dict(zip("ᴀʙᴄᴅᴇꜰɢʜɪᴊᴋʟᴍɴᴏᴘʀꜱᴛᴜᴠᴡʏᴢ", "abcdefghijklmnoprstuvwyz", strict=True))
    | {chr(first + n): chr(ord("A") + n) for first in (0x1F150, 0x1F170) for n in range(26)}  # white on black
    # Arabic, Persian, Urdu, Kurdish; Hindi
    | dict(zip("\u0671\u0649\u06cc\u06a9", "\u0627\u064a\u064a\u0643", strict=True))
    | dict.fromkeys("\u0629\u06be\u06c0\u06c1\u06c2\u06c3\u06d5", "\u0647")
    | {"\u0901": "\u0902"}
    | {chr(n): chr(n - 0x60) for n in (*range(0x30A1, 0x30F7), 0x30FD, 0x30FE)}  # Katakana as Hiragana
)
"""What people type for letters that Unicode does not decompose."""

_NASALS = "|".join(
    f"{chr(block + n)}{chr(block + 0x4D)}(?=[{chr(block + n - 4)}-{chr(block + n - 1)}])"
    for block in (0x900, 0xA80, 0xC00, 0xC80)
    for n in (0x19, 0x1E, 0x23, 0x28, 0x2E)
)
"""Matches a nasal before a letter of its row, for which people also write a dot: Hindi, Gujarati, Telugu, Kannada."""

_THAI_TONE = "([\u0e48-\u0e4b])([\u0e31\u0e34-\u0e3a\u0e4d])"
"""Matches a tone mark before the vowel below or above, where it also looks right."""

_INSIDE = (
    r"(?:['\u2019`\u00b7\u05f3\u05f4\"]|(?<=[^\W\d_])[./](?=[^\W\d_])|"
    r"(?<=\d)[.,\u066c](?=\d{3}(?!\d))|(?<!\d)[-\u2010]|[-\u2010](?!\d))"
)
_JOINED = rf"(?<![^\W_])[^\W_\u0e00-\U0003ffff]+(?:{_INSIDE}[^\W_\u0e00-\U0003ffff]+)+"
"""Matches a word with punctuation inside, in a script that has spaces."""

_SPELLED = str.maketrans(dict(zip("äöüåÄÖÜÅ", ("ae", "oe", "ue", "aa") * 2, strict=True)))
"""What people type for letters that they also type without their accents."""

_THIRTY_MARKS = r"[^\w\s\x00-\x7f]{30}"

_ALONE = r"(?<!\S)(?:[$+#<=>^~]{1,3}(?!\S)|[$#](?=\d))"  # also in $100; a longer row is a ruler
_AT_A_WORD = r"(?:\+{2,3}(?!\+)|[+#♭%](?![A-Za-z+#♭%]))"  # C++, F#, C++17; no part of an address
_WITH_A_DOT = r"(?<!\.)\.([A-Za-z]\w*)"

_SYMBOLS = r"[^\w\s\x00-\x7f]+"
"""Matches symbols, punctuation and marks. SQLite takes symbols that are newer than its Unicode 6 for letters."""

_SYMBOL = "[\U0001f1e6-\U0001f1ff]{2}|."
"""Matches one symbol. The two letters of a flag are one: 🇩🇪🇸🇪 has no 🇪🇸."""

_SYMBOLIC_PUNCTUATION = "\u3030\u303d\u00a7\u00b6\u2020\u2021\u2030\u203b\u2042"
"""What Unicode calls punctuation: two emoji, and §, ¶, †, ‡, ‰, ※ and ⁂."""

_STAR_KEY = "\\*\ufe0f?\u20e3"
"""Matches the emoji of the key *, which without its marks would be a plain star."""

_DOUBLE_MARKS = str.maketrans({"\u203c": "\u2757", "\u2049": "\u2757\u2753"})
"""The emoji !! and !?, of which NFKC makes plain punctuation, as the emoji of each mark."""


def indexed(text: str) -> str:
    """The text with separated words. The index itself folds case and the accents of composed Latin letters."""
    text = _typed(text[:MAX_INDEXED])
    terms = text.split()
    parted = re.findall(_JOINED, " ".join(term for term in terms if not term.isalnum()))
    joined = {re.sub(r"\W", "", word) for word in parted}
    accented = {*re.findall(r"\w+", " ".join(term for term in terms if not term.isascii()))}
    more = joined | {word.translate(_SPELLED) for word in joined | accented} - accented
    return " ".join([_words(text), *sorted(more), *_signs(text)])


def _words(text: str) -> str:
    if text.isascii():
        return text
    text = re.sub(_SYMBOLS, lambda run: "".join(map(_kept, run[0])), text)
    return re.sub(_UNSPACED, lambda run: f" {' '.join(run[0])} ", text)


def _signs(text: str) -> list[str]:
    """The words of `text` that have symbols, in private letters. A row of the same symbol counts once."""
    signs = ["".join(map(_letter, alone)) for alone in re.findall(_ALONE, text)]
    for sign in re.finditer(_AT_A_WORD, text):
        before = text[max(0, sign.start() - MAX_WORD) : sign.start()]
        if word := re.search(r"[A-Za-z0-9\u00c0-\u024f]+\Z", before) or re.search(r"[^\W_]+\Z", before):
            signs.append(word[0] + "".join(map(_letter, sign[0])))
    signs += [_letter(".") + word for word in re.findall(_WITH_A_DOT, text)]
    if not text.isascii():
        for row in re.findall(_SYMBOLS, text):
            symbols = re.findall(_SYMBOL, "".join(filter(_is_symbol, row)))
            signs += ["".join(map(_letter, symbol)) for symbol, _ in groupby(symbols)]
    return signs


def _is_symbol(character: str) -> bool:
    """Whether a character is a symbol. Symbols newer than Python and letters in flags count; skin colours do not."""
    category = unicodedata.category(character)
    is_new = category == "Cn" and character < "\U00020000"
    is_of_flag = "\U000e0020" <= character <= "\U000e007f"
    return category in ("Sm", "Sc", "So") or is_new or is_of_flag or character in _SYMBOLIC_PUNCTUATION


def _letter(symbol: str) -> str:
    return chr(0xF0000 + ord(symbol) % 0x20000)


def _kept(character: str) -> str:
    """The character, or a space for a symbol that the index may not know. It knows Unicode 3.2. Marks belong to
    words."""
    is_old = unicodedata.ucd_3_2_0.category(character) != "Cn"
    return character if is_old or unicodedata.category(character) in ("Mn", "Mc", "Me", "Co") else " "


def as_read(words: str, most: int = MAX_CHARACTERS) -> str:
    """The words of a search as `query` reads them: a full-width * is one, too. Raises UsageError for more than `most`
    characters, also if fewer are typed: some are read as many."""
    text = _compatible(words.replace("\0", " "))
    if max(len(words), len(text)) > most:
        read = f"; they are read as {len(text)}" if len(text) > len(words) else ""
        raise UsageError(f"search for at most {most} characters, not {len(words)}{read}")
    return text


def query(words: str) -> str:
    """The index query for `words`. A text must match all of them; `word*` matches any word that begins with `word`.

    Nothing else in `words` is read as query syntax. Raises UsageError for no words or too many.
    """
    text = as_read(words)
    terms = text.split()
    if not 1 <= len(terms) <= MAX_WORDS:
        raise UsageError(f"search for 1 to {MAX_WORDS} words, not {len(terms)}")
    return " AND ".join(chain.from_iterable(map(_phrases, terms))) or '""'


def length_of_last(text: str) -> int:
    """The number of characters of the last word in `text` as the index has it: without punctuation and accents. `text*`
    finds words that begin with them. In a script without spaces, the whole text counts."""
    seen = _typed(text)
    words = "".join(character if unicodedata.category(character)[0] in "LMN" else " " for character in seen).split()
    if not words:
        return 0
    last = _words(words[-1]).split()[-1]
    return len(words[-1]) if re.fullmatch(_UNSPACED, last) else len(last)


def _phrases(term: str) -> list[str]:
    """The queries for a term: its words in a row or joined, and its words with signs, or its symbols if it has no
    letters. A dot counts only in front: asp.net also finds asp-net."""
    start = _typed(term.rstrip("*"))
    signs = _signs(start)
    if not re.search(r"[^\W_]", start):
        return [f'"{" ".join(signs)}"'] if signs else []
    end = '"*' if term.endswith("*") else '"'
    required = [sign for sign in signs if sign[0].isalnum() or (start[0] == "." and sign[-1].isalnum())]
    forms = [_words(start).replace('"', '""')]
    if re.fullmatch(rf"\W*{_JOINED}\W*", start):
        forms.append(re.sub(r"\W", "", start))
    either = " OR ".join(f'"{words}{end}' for words in forms)
    return [f"({either})", *(f'"{sign}{end}' for sign in required)]


def _typed(text: str) -> str:
    """The text in the letters that people type, without the accents that the index does not fold itself."""
    if text.isascii():
        return text
    text = re.sub(_NOT_LATIN, lambda run: _without_accents(run[0]), _compatible(text).translate(_TYPED))
    text = re.sub(_THAI_TONE, r"\2\1", text.replace("\u0e40\u0e40", "\u0e41"))  # two signs look like one
    text = re.sub(_NASALS, lambda nasal: chr(ord(nasal[0][0]) & ~0x7F | 2), text)
    text = re.sub(_DIGIT, lambda digit: str(unicodedata.decimal(digit[0])), text)
    text = re.sub(f"{_ACCENTS}|{_NON_JOINER}", "", text)
    return re.sub(_NEW_CASES, lambda run: run[0].casefold(), text)


def _without_accents(text: str) -> str:
    """The text without accents, but with й and ў: they have a breve and are letters of their own."""
    apart = unicodedata.normalize("NFD", text)
    return unicodedata.normalize("NFC", re.sub(rf"(?<![иИуУ])\u0306|(?!\u0306){_ACCENTS}", "", apart))


def _compatible(text: str) -> str:
    """The text in normal form NFKC. A trademark sign becomes a word, because NFKC makes letters of it. NFKC sorts the
    marks of one letter in quadratic time, and upstream may send a million of them. Unicode's stream-safe form therefore
    splits them with a mark that counts as an accent here."""
    text = re.sub(_STAR_KEY, "\u2731", re.sub("[\u2120\u2122]", r" \g<0>", text))
    marked = re.sub(_THIRTY_MARKS, "\\g<0>\u034f", text)
    return unicodedata.normalize("NFKC", marked.translate(_DOUBLE_MARKS))
