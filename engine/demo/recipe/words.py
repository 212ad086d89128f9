"""Word and fact tables that the lessons draw from."""

NAMES = (
    "Anna Ben Clara David Emma Felix Grace Henry Ivy Jack Kate Leo Mia Noah Olive Paul Quinn Rosa Sam Tina Uma Victor "
    "Wendy Xavier Yara Zoe Adam Bella Carl Dora Eric Fiona George Hanna Ian Julia Maria John Sarah Tom Lisa Peter Alice "
    "Bob Carol Omar Priya Chen Yuki Ahmed Lena Max Nina Oscar"
).split()
ANIMALS = (
    "fox bear wolf lion tiger horse cow sheep goat pig cat dog mouse rabbit duck goose owl crow frog fish whale snake "
    "turtle monkey eagle deer camel otter panda zebra"
).split()
ADJECTIVES = (
    "red blue green yellow black white brown grey small big old young fast slow happy sad quiet loud brave shy warm "
    "cold tall short soft clever"
).split()
OBJECTS = (
    "ball book cup key lamp hat coat box pen ring coin map stone rope bell drum flag boat kite chair table plate spoon "
    "clock basket bottle candle mirror ladder pillow"
).split()
PLACES = (
    "kitchen garden bedroom office cellar attic garage park school shop library station museum bakery hall bathroom"
).split()
FRUITS = "apple banana cherry grape lemon mango orange peach pear plum melon kiwi".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
LANGUAGES = "French German Spanish Italian Polish Dutch Japanese Arabic Greek Turkish".split()
NUMBER_WORDS = "zero one two three four five six seven eight nine ten eleven twelve".split()

CAPITALS = dict(
    pair.split(":")
    for pair in (
        "France:Paris,Germany:Berlin,Spain:Madrid,Italy:Rome,Norway:Oslo,Austria:Vienna,Portugal:Lisbon,Ireland:Dublin,"
        "Greece:Athens,Japan:Tokyo,Egypt:Cairo,Peru:Lima,Ecuador:Quito,Canada:Ottawa,Poland:Warsaw,Finland:Helsinki,"
        "Sweden:Stockholm,Denmark:Copenhagen,Hungary:Budapest,Kenya:Nairobi,Belgium:Brussels,the Netherlands:Amsterdam,"
        "Switzerland:Bern,Czechia:Prague,Slovakia:Bratislava,Slovenia:Ljubljana,Croatia:Zagreb,Serbia:Belgrade,"
        "Romania:Bucharest,Bulgaria:Sofia,Ukraine:Kyiv,Russia:Moscow,Turkey:Ankara,Iran:Tehran,Iraq:Baghdad,"
        "Israel:Jerusalem,Jordan:Amman,Lebanon:Beirut,Syria:Damascus,India:New Delhi,Pakistan:Islamabad,"
        "Afghanistan:Kabul,Nepal:Kathmandu,Bangladesh:Dhaka,Thailand:Bangkok,Vietnam:Hanoi,Cambodia:Phnom Penh,"
        "Malaysia:Kuala Lumpur,Indonesia:Jakarta,the Philippines:Manila,China:Beijing,Mongolia:Ulaanbaatar,"
        "South Korea:Seoul,North Korea:Pyongyang,Australia:Canberra,New Zealand:Wellington,the United States:Washington,"
        "Mexico:Mexico City,Cuba:Havana,Jamaica:Kingston,Guatemala:Guatemala City,Panama:Panama City,Colombia:Bogota,"
        "Venezuela:Caracas,Brazil:Brasilia,Argentina:Buenos Aires,Chile:Santiago,Uruguay:Montevideo,Paraguay:Asuncion,"
        "Bolivia:Sucre,Morocco:Rabat,Algeria:Algiers,Tunisia:Tunis,Libya:Tripoli,Sudan:Khartoum,Ethiopia:Addis Ababa,"
        "Somalia:Mogadishu,Uganda:Kampala,Rwanda:Kigali,Tanzania:Dodoma,Ghana:Accra,Nigeria:Abuja,Senegal:Dakar,"
        "Mali:Bamako,Angola:Luanda,Zambia:Lusaka,Zimbabwe:Harare,Namibia:Windhoek,South Africa:Pretoria,"
        "the United Kingdom:London,England:London,Scotland:Edinburgh,Wales:Cardiff,Iceland:Reykjavik,Estonia:Tallinn,"
        "Latvia:Riga,Lithuania:Vilnius,Albania:Tirana,Cyprus:Nicosia,Malta:Valletta,Luxembourg:Luxembourg"
    ).split(",")
)
CITIES = (
    "Paris,London,Berlin,Madrid,Rome,Oslo,Vienna,Lisbon,Dublin,Athens,Tokyo,Cairo,Lima,Quito,Delhi,Boston,Chicago,"
    "Denver,Seattle,Sydney,Toronto,Prague,Warsaw,Helsinki,Munich,Milan,Lyon,Geneva,Hamburg,Oxford,Kyoto,Mumbai,Miami,"
    "Dallas,Austin,Zurich,Naples,Porto,New York,San Francisco,Los Angeles,Cape Town,Hong Kong,Mexico City"
).split(",")
OPPOSITES = dict(
    pair.split(":")
    for pair in (
        "hot:cold,big:small,fast:slow,old:young,up:down,open:closed,light:dark,happy:sad,wet:dry,full:empty,loud:quiet,"
        "early:late,hard:soft,high:low,near:far,strong:weak,black:white,left:right,day:night,good:bad,rich:poor,"
        "thick:thin,long:short,clean:dirty,cheap:expensive,deep:shallow,heavy:light,inside:outside,top:bottom,"
        "first:last,love:hate,win:lose,buy:sell,true:false,yes:no,begin:end,push:pull,wide:narrow"
    ).split(",")
)
SOUNDS = dict(
    pair.split(":")
    for pair in (
        "dog:woof,cat:meow,cow:moo,duck:quack,sheep:baa,pig:oink,frog:ribbit,owl:hoot,horse:neigh,mouse:squeak,"
        "lion:roar,bee:buzz,snake:hiss,crow:caw,wolf:howl"
    ).split(",")
)
YOUNG = dict(
    pair.split(":")
    for pair in (
        "dog:puppy,cat:kitten,cow:calf,sheep:lamb,horse:foal,pig:piglet,goat:kid,duck:duckling,goose:gosling,bear:cub,"
        "deer:fawn,frog:tadpole,owl:owlet,swan:cygnet,hen:chick"
    ).split(",")
)
LEGS = {"dog": 4, "cat": 4, "horse": 4, "spider": 8, "bird": 2, "ant": 6, "bee": 6, "cow": 4, "snake": 0, "duck": 2}
THING_COLORS = dict(
    pair.split(":")
    for pair in (
        "grass:green,snow:white,coal:black,a banana:yellow,a lemon:yellow,blood:red,the sky:blue,a carrot:orange,"
        "a cherry:red,milk:white,an elephant:grey,a frog:green,chocolate:brown,the sun:yellow,a strawberry:red"
    ).split(",")
)
CURRENCIES = dict(
    pair.split(":")
    for pair in (
        "Japan:yen,France:euro,Germany:euro,the United Kingdom:pound,the United States:dollar,India:rupee,Mexico:peso,"
        "Switzerland:franc,Sweden:krona,Poland:zloty,Russia:ruble,China:yuan,Turkey:lira,Hungary:forint,South Korea:won"
    ).split(",")
)
CONTINENTS = dict(
    pair.split(":")
    for pair in (
        "France:Europe,Germany:Europe,Spain:Europe,Poland:Europe,Norway:Europe,Japan:Asia,China:Asia,India:Asia,"
        "Thailand:Asia,Egypt:Africa,Kenya:Africa,Ghana:Africa,Nigeria:Africa,Morocco:Africa,Brazil:South America,"
        "Peru:South America,Chile:South America,Argentina:South America,Canada:North America,Mexico:North America,"
        "the United States:North America,Cuba:North America"
    ).split(",")
)
ELEMENTS = dict(
    pair.split(":")
    for pair in (
        "hydrogen:H,helium:He,lithium:Li,carbon:C,nitrogen:N,oxygen:O,fluorine:F,neon:Ne,sodium:Na,magnesium:Mg,"
        "aluminium:Al,silicon:Si,phosphorus:P,sulfur:S,chlorine:Cl,argon:Ar,potassium:K,calcium:Ca,iron:Fe,copper:Cu,"
        "zinc:Zn,silver:Ag,tin:Sn,gold:Au,mercury:Hg,lead:Pb"
    ).split(",")
)
FILLERS = (
    "The sky was clear that day.", "Nobody spoke for a while.", "The train left on time.", "It rained in the morning.",
    "The old clock struck four.", "A letter lay on the table.", "The river was calm.", "They walked home in silence.",
    "The shop opened at nine.", "Snow fell on the hills.", "The soup was still warm.", "A bird sang outside.",
    "The lights went out at ten.", "Two children played in the yard.", "The bread smelled good.", "A cart rolled by.",
)  # fmt: skip
