"""Names and texts for generated videos, and upstream's own lists of regions and categories.

The texts are hard to handle on purpose: every region has right-to-left scripts, combining marks,
joined emoji, quotes, markup and line breaks.
"""

# ruff: noqa: RUF001 - this file needs characters that look like others


def _pairs(text: str) -> dict[str, str]:
    """The names by key, from lines of `KEY Name; KEY Name`."""
    entries = (entry.strip() for line in text.strip().splitlines() for entry in line.split(";"))
    return dict(entry.split(" ", 1) for entry in entries if entry)


# i18nRegions.list: the regions for which upstream has a chart. US is first: the worldwide hits come from it.
REGIONS = _pairs("""
US United States; AE United Arab Emirates; AR Argentina; AT Austria; AU Australia; AZ Azerbaijan
BA Bosnia and Herzegovina; BD Bangladesh; BE Belgium; BG Bulgaria; BH Bahrain; BO Bolivia; BR Brazil
BY Belarus; CA Canada; CH Switzerland; CL Chile; CO Colombia; CR Costa Rica; CY Cyprus; CZ Czechia
DE Germany; DK Denmark; DO Dominican Republic; DZ Algeria; EC Ecuador; EE Estonia; EG Egypt; ES Spain
FI Finland; FR France; GB United Kingdom; GE Georgia; GH Ghana; GR Greece; GT Guatemala; HK Hong Kong
HN Honduras; HR Croatia; HU Hungary; ID Indonesia; IE Ireland; IL Israel; IN India; IQ Iraq; IS Iceland
IT Italy; JM Jamaica; JO Jordan; JP Japan; KE Kenya; KH Cambodia; KR South Korea; KW Kuwait
KZ Kazakhstan; LA Laos; LB Lebanon; LI Liechtenstein; LK Sri Lanka; LT Lithuania; LU Luxembourg
LV Latvia; LY Libya; MA Morocco; MD Moldova; ME Montenegro; MK North Macedonia; MT Malta; MX Mexico
MY Malaysia; NG Nigeria; NI Nicaragua; NL Netherlands; NO Norway; NP Nepal; NZ New Zealand; OM Oman
PA Panama; PE Peru; PG Papua New Guinea; PH Philippines; PK Pakistan; PL Poland; PR Puerto Rico
PT Portugal; PY Paraguay; QA Qatar; RO Romania; RS Serbia; RU Russia; SA Saudi Arabia; SE Sweden
SG Singapore; SI Slovenia; SK Slovakia; SN Senegal; SV El Salvador; TH Thailand; TN Tunisia; TR Türkiye
TW Taiwan; TZ Tanzania; UA Ukraine; UG Uganda; UY Uruguay; VE Venezuela; VN Vietnam; YE Yemen
ZA South Africa; ZW Zimbabwe
""")

# videoCategories.list: the categories that a video may have.
CATEGORIES = _pairs("""
1 Film & Animation; 2 Autos & Vehicles; 10 Music; 15 Pets & Animals; 17 Sports; 19 Travel & Events
20 Gaming; 22 People & Blogs; 23 Comedy; 24 Entertainment; 25 News & Politics; 26 Howto & Style
27 Education; 28 Science & Technology; 29 Nonprofits & Activism
""")

# The language of a region's own titles; English where no entry names one.
LANGUAGES = {
    **dict.fromkeys(("DE", "AT", "CH", "LI"), "de"),
    **dict.fromkeys(("FR", "BE", "LU", "SN"), "fr"),
    **dict.fromkeys(("BR", "PT"), "pt"),
    **dict.fromkeys(("ES", "MX", "AR", "CL", "CO", "PE", "VE", "UY"), "es"),
    **dict.fromkeys(("IN", "NP"), "hi"),
    **dict.fromkeys(("AE", "BH", "DZ", "EG", "IQ", "JO", "KW", "LB", "SA", "YE"), "ar"),
    **dict.fromkeys(("RU", "BY", "KZ"), "ru"),
    "IL": "he",
    "JP": "ja",
    "KR": "ko",
    "TH": "th",
    "TR": "tr",
    "VN": "vi",
    "TW": "zh",
    "HK": "zh",
}

_EVERYWHERE = (
    "👩‍👩‍👧‍👦 {name}'s family vlog #{number} 🏳️‍🌈",
    "Cafe\u0301 del Mar — {name} (e\u0301 is two code points)",
    '{name}: "Don\'t <b>click</b> & run" 50% off',
    "مرحبا {name} — mixed direction שלום {number}",
    "Z\u0351a\u0300l\u030ag\u0327o\u0328 hour with {name}",
    "𝕱𝖗𝖆𝖐𝖙𝖚𝖗 & ＦＵＬＬＷＩＤＴＨ {number}",
    "{name} | " + "a very long title " * 4,
)

# Ordinary titles are repeated until they make up most of a chart.
TITLES = {
    language: ordinary * (24 // len(ordinary)) + _EVERYWHERE
    for language, ordinary in {
        "en": (
            "{name} - Official Music Video",
            "I Spent {number} Days in the Desert 🏜️",
            "Why {name} Isn't Coming Back",
            "{number} Gadgets You Didn't Know You Needed",
            "{name} vs. the World: Full Match Highlights",
            "Making the Perfect Sourdough 🍞 in {number} Minutes",
        ),
        "de": (
            "{name}: Über die Brücke nach Köln",
            "Die süßeste Überraschung für {name} 🎂",
            "{number} Fehler, die Anfänger beim Heimwerken machen",
            "Größer, schöner, lauter: {name} live",
        ),
        "fr": (
            "{name} - Où es-tu passé ? (Clip officiel)",
            "J'ai mangé {number} crêpes à Noël 🥞",
            "L'été où {name} a tout changé",
            "Ça y est : le cœur de {name}",
        ),
        "pt": (
            "{name} - Coração de São João (Clipe Oficial)",
            "{number} lições que aprendi na rua",
            "Não é possível, {name}! 😂",
        ),
        "es": (
            "{name} - Mañana será otro día (Video Oficial)",
            "¿Qué pasó con {name}? ¡{number} pistas!",
            "El niño que venció a {name} ⚽",
        ),
        "hi": (
            "{name} - दिल की बात (आधिकारिक वीडियो)",
            "{number} मिनट में स्वादिष्ट खाना 🍛",
            "क्रिकेट: भारत की शानदार जीत | {name}",
            "ज़िंदगी और क्षितिज - भाग {number}",
        ),
        "ar": (
            "{name} - أغنية الصيف (فيديو كليب)",
            "أفضل {number} وصفات رمضان 🌙",
            "ملخص المباراة: هدف {name} الرائع",
        ),
        "he": ("{name} - שיר חדש (קליפ רשמי)", "{number} דקות של צחוק 😂"),
        "ja": ("{name}「夏の終わり」ミュージックビデオ", "【{number}分】簡単レシピ🍜", "ｶﾞﾝﾊﾞﾚ {name}"),
        "ko": ("{name} '봄날' 공식 뮤직비디오", "{number}분 만에 끝내는 요리 🍲"),
        "ru": ("{name} — Новая песня (клип)", "{number} ошибок новичка", "Ёжик в тумане и {name}"),
        "th": ("{name} - เพลงใหม่ (มิวสิควิดีโอ)", "ทำอาหารใน {number} นาที 🍜"),
        "tr": ("{name} - İstanbul'da Işık (Resmi Klip)", "{number} dakikada şiş kebap 🍢"),
        "vi": ("{name} - Nỗi nhớ mùa hè (Video chính thức)", "{number} phút nấu phở ngon 🍜"),
        "zh": ("{name} - 夏天的風（官方影片）", "{number}分鐘學會煮飯 🍚"),
    }.items()
}

NAMES = (
    "Zoë & The Owls", "Björk's Cousin", "Los Ñandúes", "राधा", "DJ Ünal", "O'Malley", "MØ-Town",
    "Señor Queso", "Łukasz", "فيروز", "Straße 9", "K!ng", "山田太郎", "Nguyễn", "Chloé", "🦊 Foxcraft",
)  # fmt: skip

DESCRIPTIONS = (
    "{title}\n\nSubscribe → https://example.com/subscribe\n#shorts #trending",
    'Line one\nLine two\r\nLine three\twith a tab and a "quote"\n\n© 2026',
    "Kapitel:\n0:00 Anfang\n1:23 Mitte 🎬\n9:59 Ende",
    "",
    "वर्णन: {title}\nالوصف\nתיאור",
)

TAGS = ("music", "live", "über", "संगीत", "موسيقى", "gaming", "how to", "世界", "café", "90's")
