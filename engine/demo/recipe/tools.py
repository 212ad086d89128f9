"""Tool lessons: definitions like those that real clients send, requests that need them, and requests that do not."""

import dataclasses
import json
import typing

from engine.demo.recipe.lessons import Message, Rng, Sample, World, plural, user
from engine.demo.recipe.words import ADJECTIVES, ANIMALS, CITIES, DAYS, FRUITS, LANGUAGES, NAMES, OBJECTS, PLACES

Schema = dict[str, typing.Any]
Arguments = dict[str, typing.Any]


@dataclasses.dataclass
class Use:
    """One request that needs a tool: arguments of the call, the tool's result and the answer after it."""

    said: str
    arguments: Arguments
    result: str
    answer: str


@dataclasses.dataclass
class Tool:
    """One function: its JSON-schema definition and a way to draw uses of it."""

    name: str
    description: str
    parameters: dict[str, Schema]
    required: list[str]
    use: typing.Callable[[Rng], Use]

    def definition(self, r: Rng) -> Schema:
        """The OpenAI form; clients differ in what they add."""
        schema: Schema = {"type": "object", "properties": self.parameters, "required": self.required}
        if r.random() < 0.25:
            schema["additionalProperties"] = False
        function: Schema = {"name": self.name, "description": self.description, "parameters": schema}
        if r.random() < 0.15:
            function["strict"] = True
        return {"type": "function", "function": function}


STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}


def described(schema: Schema, text: str, r: Rng) -> Schema:
    """``schema`` with a description, as about half of all clients give one."""
    return {**schema, "description": text} if r.random() < 0.6 else dict(schema)


def clock(r: Rng) -> str:
    """A time of day, HH:MM."""
    return f"{r.randint(0, 23):02}:{r.choice([0, 15, 30, 45]):02}"


def phrase(r: Rng) -> str:
    """Two to four plain words."""
    return " ".join(r.choice(ADJECTIVES + ANIMALS + OBJECTS + FRUITS) for _ in range(r.randint(2, 4)))


def identifier(r: Rng) -> str:
    """A made-up word, number or code, to be copied letter by letter."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    kind = r.randrange(3)
    if kind == 0:
        return "".join(r.choice(letters) for _ in range(r.randint(3, 8)))
    if kind == 1:
        return f"{r.choice(letters).upper()}{r.choice(letters).upper()}-{r.randint(10, 9999)}"
    return r.choice(NAMES + CITIES + OBJECTS)


def file_name(r: Rng) -> str:
    """A relative or absolute path."""
    stem = r.choice(OBJECTS + ANIMALS + ["notes", "main", "readme", "data", "config", "index", "test", "report"])
    folder = r.choice(["", "", "src/", "docs/", "data/", "/home/user/", "/tmp/"])
    return f"{folder}{stem}.{r.choice(['txt', 'py', 'md', 'json', 'csv', 'html'])}"


# Each maker draws the names a client might have chosen and returns a tool that fits them.


def weather(r: Rng) -> Tool:
    """Weather of a city, with an optional unit."""
    key = r.choice(["city", "city", "location", "location", "place", "town"])
    with_unit = r.random() < 0.4
    parameters = {key: described(STRING, r.choice(["The name of the city", "City name", "The city, e.g. Paris"]), r)}
    if with_unit:
        parameters["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}

    def use(r: Rng) -> Use:
        city, sky, degrees = (
            r.choice(CITIES),
            r.choice(["sunny", "rainy", "cloudy", "windy", "snowy", "foggy"]),
            r.randint(-9, 39),
        )
        arguments: Arguments = {key: city}
        said = r.choice(["What is the weather in {}?", "What's the weather in {}?", "What is the weather like in {}?",
                         "Weather for {}, please.", "How is the weather in {}?", "Tell me the weather in {}.",
                         "Get the weather for {}.", "weather in {}", "How's the weather in {} today?",
                         "What is the weather like in {} today?", "Check the weather in {}."]).format(city)  # fmt: skip
        if with_unit and r.random() < 0.5:
            arguments["unit"] = r.choice(["celsius", "fahrenheit"])
            said = said.rstrip("?.") + f" in {arguments['unit']}" + ("?" if said.endswith("?") else ".")
        result = r.choice(
            [f"{sky}, {degrees} degrees", json.dumps({"temperature": degrees, "condition": sky}),
             json.dumps({key: city, "temperature": degrees, "condition": sky}), f"{degrees}°C and {sky}"]
        )  # fmt: skip
        return Use(said, arguments, result, f"It is {sky} in {city} with {degrees} degrees.")

    name = r.choice(["get_weather", "get_weather", "get_current_weather", "weather", "getWeather", "fetch_weather"])
    return Tool(name, r.choice(["Get the weather for a city.", "Get the current weather in a given location",
                "Returns the weather of a place."]), parameters, [key], use)  # fmt: skip


def local_time(r: Rng) -> Tool:
    """Current time of a city."""
    key = r.choice(["city", "location", "timezone_city"])

    def use(r: Rng) -> Use:
        city, time = r.choice(CITIES), clock(r)
        said = r.choice(["What time is it in {}?", "Tell me the time in {}.", "Current time in {}?"]).format(city)
        return Use(said, {key: city}, r.choice([time, json.dumps({"time": time})]), f"It is {time} in {city}.")

    return Tool(
        r.choice(["get_time", "current_time", "getTime"]), "Get the current time in a city.", {key: STRING}, [key], use
    )


def calendar(r: Rng) -> Tool:
    """Add an event."""
    with_time = r.random() < 0.6
    parameters = {"title": described(STRING, "Title of the event", r), "day": described(STRING, "Day of the week", r)}
    if with_time:
        parameters["time"] = described(STRING, "Start time, HH:MM", r)

    def use(r: Rng) -> Use:
        title = f"{r.choice(ADJECTIVES + OBJECTS)} {r.choice(['lesson', 'meeting', 'party', 'lunch', 'call'])}"
        day, time = r.choice(DAYS), clock(r)
        arguments: Arguments = {"title": title, "day": day}
        said = r.choice(
            [
                f"Put {title} on my calendar on {day}",
                f"Add {title} to my calendar on {day}",
                f"Schedule {title} on {day}",
            ]
        )
        if with_time:
            arguments["time"] = time
            said += f" at {time}"
        return Use(said + ".", arguments, r.choice(["ok", "created", '{"status": "ok"}']), f"Done: {title} on {day}.")

    return Tool(r.choice(["add_event", "create_event", "createCalendarEvent"]), "Add an event to the calendar.", parameters,
                list(parameters), use)  # fmt: skip


def message(r: Rng) -> Tool:
    """Send a text to a person."""
    to, text = r.choice([("to", "text"), ("recipient", "message"), ("person", "content")])

    def use(r: Rng) -> Use:
        name = r.choice(NAMES)
        words = r.choice([f"The {r.choice(OBJECTS)} is in {r.choice(CITIES)}.", f"I bought a {r.choice(ADJECTIVES)} {r.choice(OBJECTS)}.",
                          f"See you on {r.choice(DAYS)} at {clock(r)}.", phrase(r)])  # fmt: skip
        said = r.choice(
            [
                f"Send {name} the message: {words}",
                f"Write to {name}: {words}",
                f'Send a message to {name} saying "{words}"',
            ]
        )
        return Use(
            said, {to: name, text: words}, r.choice(["sent", "ok", '{"sent": true}']), f"I sent the message to {name}."
        )

    return Tool(r.choice(["send_message", "send_text", "sendMessage"]), "Send a message to a person.", {to: STRING, text: STRING},
                [to, text], use)  # fmt: skip


def mail(r: Rng) -> Tool:
    """Send an e-mail with subject and body."""

    def use(r: Rng) -> Use:
        address = f"{r.choice(NAMES).lower()}@{r.choice(['example.com', 'mail.org', 'work.net'])}"
        subject, body = phrase(r), phrase(r)
        said = f"Send an email to {address} with the subject {subject} and the text {body}."
        return Use(said, {"to": address, "subject": subject, "body": body}, "ok", f"I sent the email to {address}.")

    return Tool(r.choice(["send_email", "send_mail"]), "Send an email.", {"to": STRING, "subject": STRING, "body": STRING},
                ["to", "subject", "body"], use)  # fmt: skip


def timer(r: Rng) -> Tool:
    """Start a timer."""
    key = r.choice(["minutes", "minutes", "duration_minutes", "length"])

    def use(r: Rng) -> Use:
        m = r.randint(1, 90)
        said = r.choice(
            [
                f"Set a timer for {m} minutes.",
                f"Start a {m} minute timer.",
                f"Timer: {m} minutes.",
                f"Remind me in {m} minutes.",
            ]
        )
        return Use(said, {key: m}, r.choice(["ok", "started"]), f"The timer is set for {m} minutes.")

    return Tool(r.choice(["set_timer", "start_timer"]), "Set a timer in minutes.", {key: INTEGER}, [key], use)


def calculator(r: Rng) -> Tool:
    """Evaluate an expression."""
    key = r.choice(["expression", "expression", "formula"])

    def use(r: Rng) -> Use:
        a, b, sign = r.randint(2, 999), r.randint(2, 999), r.choice("+-*")
        result = {"+": a + b, "-": a - b, "*": a * b}[sign]
        said = r.choice(
            [
                f"Use the calculator: {a} {sign} {b}",
                f"Calculate {a} {sign} {b} with the tool.",
                f"Use the tool to compute {a} {sign} {b}.",
            ]
        )
        return Use(said, {key: f"{a} {sign} {b}"}, str(result), f"The result is {result}.")

    return Tool(
        r.choice(["calculate", "calculator", "evaluate"]),
        "Evaluate an arithmetic expression.",
        {key: STRING},
        [key],
        use,
    )


def adder(r: Rng) -> Tool:
    """Two or more integer arguments."""
    listed = r.random() < 0.5

    def use(r: Rng) -> Use:
        numbers = [r.randint(1, 99) for _ in range(r.randint(2, 5) if listed else 2)]
        said = r.choice(["Add the numbers {} with the tool.", "Use the tool to add {}."]).format(
            " and ".join(map(str, numbers))
        )
        arguments: Arguments = {"numbers": numbers} if listed else {"a": numbers[0], "b": numbers[1]}
        return Use(said, arguments, str(sum(numbers)), f"The sum is {sum(numbers)}.")

    parameters: dict[str, Schema] = (
        {"numbers": {"type": "array", "items": {"type": "number"}}} if listed else {"a": NUMBER, "b": NUMBER}
    )
    return Tool(r.choice(["add", "add_numbers", "sum"]), "Add numbers.", parameters, list(parameters), use)


def search(r: Rng) -> Tool:
    """Search for a phrase, optionally with a limit."""
    with_limit = r.random() < 0.4

    def use(r: Rng) -> Use:
        query = phrase(r)
        arguments: Arguments = {"query": query}
        said = r.choice(
            [f"Search for {query}", f"Search the web for {query}", f"Look up {query}", f"Find {query} on the web"]
        )
        if with_limit and r.random() < 0.6:
            arguments["limit"] = r.randint(1, 20)
            said += f" and show {arguments['limit']} results"
        found = phrase(r)
        return Use(said + ".", arguments, found, f"I found this: {found}.")

    parameters = {"query": described(STRING, "The search query", r)} | ({"limit": INTEGER} if with_limit else {})
    return Tool(
        r.choice(["search", "web_search", "search_web", "google_search"]), "Search the web.", parameters, ["query"], use
    )


def translate(r: Rng) -> Tool:
    """Translate a text."""
    key = r.choice(["language", "target_language"])

    def use(r: Rng) -> Use:
        text, language = phrase(r), r.choice(LANGUAGES)
        said = r.choice([f"Translate {text} into {language}.", f"Translate '{text}' to {language}."])
        out = identifier(r)
        return Use(said, {"text": text, key: language}, out, f"In {language}: {out}")

    return Tool("translate", "Translate a text into a language.", {"text": STRING, key: STRING}, ["text", key], use)


def lights(r: Rng) -> Tool:
    """Switch lights: a boolean argument and an optional integer."""
    dimmer = r.random() < 0.5

    def use(r: Rng) -> Use:
        room, on = r.choice(PLACES), r.random() < 0.5
        state = "on" if on else "off"
        arguments: Arguments = {"room": room, "on": on}
        said = r.choice(
            [
                f"Turn {state} the light in the {room}",
                f"Switch the {room} light {state}",
                f"Lights {state} in the {room}",
            ]
        )
        if dimmer and on and r.random() < 0.6:
            arguments["brightness"] = r.randint(1, 100)
            said += f" with brightness {arguments['brightness']}"
        return Use(said + ".", arguments, "ok", f"The light in the {room} is {state}.")

    parameters = {"room": STRING, "on": BOOLEAN} | ({"brightness": INTEGER} if dimmer else {})
    return Tool(r.choice(["set_light", "switch_light", "control_light"]), "Switch the light of a room on or off.", parameters,
                ["room", "on"], use)  # fmt: skip


def heating(r: Rng) -> Tool:
    """A number argument with decimals."""

    def use(r: Rng) -> Use:
        room, degrees = r.choice(PLACES), r.choice([r.randint(10, 30), r.randint(20, 59) / 2])
        said = r.choice([f"Set the {room} to {degrees} degrees.", f"Make it {degrees} degrees in the {room}."])
        return Use(said, {"room": room, "degrees": degrees}, "ok", f"The {room} is set to {degrees} degrees.")

    return Tool(
        "set_temperature",
        "Set the temperature of a room.",
        {"room": STRING, "degrees": NUMBER},
        ["room", "degrees"],
        use,
    )


def shopping(r: Rng) -> Tool:
    """An array of strings."""

    def use(r: Rng) -> Use:
        items = r.sample(FRUITS + OBJECTS, r.randint(1, 4))
        said = f"Put {' and '.join(items)} on my {r.choice(['shopping ', ''])}list."
        return Use(said, {"items": items}, "ok", f"I added {' and '.join(items)}.")

    return Tool(r.choice(["add_items", "add_to_list", "shopping_list"]), "Add items to the shopping list.",
                {"items": {"type": "array", "items": {"type": "string"}}}, ["items"], use)  # fmt: skip


def order(r: Rng) -> Tool:
    """An object argument."""

    def use(r: Rng) -> Use:
        item, n = r.choice(FRUITS + OBJECTS), r.randint(2, 30)
        said = r.choice(
            [f"Order {n} {plural(item)}.", f"Buy {n} {plural(item)}.", f"I want to order {n} {plural(item)}."]
        )
        return Use(said, {"order": {"item": item, "quantity": n}}, "ok", f"I ordered {n} {plural(item)}.")

    schema: Schema = {
        "type": "object",
        "properties": {"item": STRING, "quantity": INTEGER},
        "required": ["item", "quantity"],
    }
    return Tool(r.choice(["place_order", "order_item"]), "Order an item.", {"order": schema}, ["order"], use)


def booking(r: Rng) -> Tool:
    """Integer, string and boolean together."""

    def use(r: Rng) -> Use:
        n, day, time, outside = r.randint(2, 12), r.choice(DAYS), clock(r), r.random() < 0.5
        said = f"Book a table for {n} on {day} at {time} {'outside' if outside else 'inside'}."
        arguments = {"guests": n, "day": day, "time": time, "outdoor": outside}
        return Use(said, arguments, "confirmed", f"The table for {n} on {day} at {time} is booked.")

    parameters = {"guests": INTEGER, "day": STRING, "time": STRING, "outdoor": BOOLEAN}
    return Tool("book_table", "Book a table in a restaurant.", parameters, list(parameters), use)


def currency(r: Rng) -> Tool:
    """Number and two enumerated strings."""
    codes = ["USD", "EUR", "GBP", "JPY", "CHF"]

    def use(r: Rng) -> Use:
        amount, (a, b), result = r.randint(1, 999), r.sample(codes, 2), r.randint(1, 9999)
        said = r.choice([f"Convert {amount} {a} to {b}.", f"How much is {amount} {a} in {b}?"])
        return Use(said, {"amount": amount, "from": a, "to": b}, str(result), f"{amount} {a} are {result} {b}.")

    enum: Schema = {"type": "string", "enum": codes}
    return Tool(r.choice(["convert_currency", "exchange"]), "Convert an amount of money.", {"amount": NUMBER, "from": enum, "to": enum},
                ["amount", "from", "to"], use)  # fmt: skip


def route(r: Rng) -> Tool:
    """An enumeration named in the request."""
    modes = ["car", "train", "bus", "bike"]

    def use(r: Rng) -> Use:
        (a, b), mode, hours = r.sample(CITIES, 2), r.choice(modes), r.randint(2, 30)
        said = r.choice([f"How do I get from {a} to {b} by {mode}?", f"Find a route from {a} to {b} by {mode}."])
        return Use(
            said,
            {"start": a, "end": b, "mode": mode},
            f"{hours} hours",
            f"It takes {hours} hours by {mode} from {a} to {b}.",
        )

    parameters: dict[str, Schema] = {"start": STRING, "end": STRING, "mode": {"type": "string", "enum": modes}}
    return Tool(
        r.choice(["find_route", "get_directions"]),
        "Find a route between two cities.",
        parameters,
        list(parameters),
        use,
    )


def read_file(r: Rng) -> Tool:
    """Read a file."""
    key = r.choice(["path", "path", "file", "filename", "filePath"])

    def use(r: Rng) -> Use:
        path, content = file_name(r), phrase(r)
        said = r.choice([f"Read the file {path}.", f"Show me {path}.", f"What is in {path}?", f"Open {path}."])
        return Use(said, {key: path}, content, f"The file {path} says: {content}")

    return Tool(
        r.choice(["read_file", "read", "open_file"]),
        "Read a file.",
        {key: described(STRING, "Path of the file", r)},
        [key],
        use,
    )


def write_file(r: Rng) -> Tool:
    """Write a file."""
    key = r.choice(["path", "filePath", "filename"])

    def use(r: Rng) -> Use:
        path, content = file_name(r), phrase(r)
        said = r.choice(
            [
                f"Write {content} to {path}.",
                f"Create {path} with the content {content}.",
                f"Save the text {content} in {path}.",
            ]
        )
        return Use(said, {key: path, "content": content}, r.choice(["ok", "written"]), f"I wrote the file {path}.")

    return Tool(
        r.choice(["write_file", "write", "create_file"]),
        "Write a file.",
        {key: STRING, "content": STRING},
        [key, "content"],
        use,
    )


def shell(r: Rng) -> Tool:
    """Run a command, or list a folder."""

    def use(r: Rng) -> Use:
        command = r.choice([f"ls {r.choice(['src', 'docs', '/tmp', '.'])}", f"cat {file_name(r)}", "git status", "make test", f"rm {file_name(r)}",
                            f"python {r.choice(OBJECTS)}.py", f"grep {r.choice(OBJECTS)} {file_name(r)}"])  # fmt: skip
        result = phrase(r)
        return Use(
            r.choice([f"Run {command}", f"Run the command {command}", f"Execute: {command}"]),
            {"command": command},
            result,
            f"The output is: {result}",
        )

    return Tool(
        r.choice(["run_command", "bash", "shell", "execute"]),
        "Run a shell command.",
        {"command": STRING},
        ["command"],
        use,
    )


def dice(r: Rng) -> Tool:
    """Integers, one of them optional."""

    def use(r: Rng) -> Use:
        sides, n = r.choice([4, 6, 8, 10, 12, 20]), r.randint(2, 6)
        arguments, said = {"sides": sides}, f"Roll a die with {sides} sides."
        if r.random() < 0.5:
            arguments["count"], said = n, f"Roll {n} dice with {sides} sides."
        result = str(r.randint(1, sides))
        return Use(said, arguments, result, f"The result is {result}.")

    return Tool("roll_dice", "Roll dice.", {"sides": INTEGER, "count": INTEGER}, ["sides"], use)


def nothing(r: Rng) -> Tool:
    """A function without parameters."""
    name, said, result, answer = r.choice(
        [("get_date", ["What is the date?", "What day is it today?"], f"{r.randint(1, 28)} May", "Today is {}."),
         ("get_battery", ["How full is the battery?", "Check the battery."], f"{r.randint(1, 100)}%", "The battery is at {}."),
         ("get_location", ["Where am I?", "What is my location?"], r.choice(CITIES), "You are in {}."),
         ("list_users", ["List the users.", "Which users are there?"], r.choice(NAMES), "The users are: {}.")]
    )  # fmt: skip
    return Tool(name, name.replace("_", " ").capitalize() + ".", {}, [],
                lambda r: Use(r.choice(said), {}, result, answer.format(result)))  # fmt: skip


def invented(r: Rng) -> Tool:
    """A function nobody has seen, with two or three typed arguments named in the request."""
    verb = r.choice("create update delete open close start stop find check move rename lock count track".split())
    noun = r.choice(OBJECTS + ANIMALS + "user order ticket task account invoice server project device report".split())
    keys = r.sample(
        "name color size owner number place label code priority status active amount tags date".split(), r.randint(1, 3)
    )
    kinds: dict[str, Schema] = {}
    for key in keys:
        kinds[key] = {"size": INTEGER, "number": INTEGER, "priority": INTEGER, "amount": NUMBER, "active": BOOLEAN,
                      "tags": {"type": "array", "items": {"type": "string"}}}.get(key, STRING)  # fmt: skip
    camel = r.random() < 0.2

    def value(r: Rng, schema: Schema) -> object:
        kind = schema["type"]
        if kind == "integer":
            return r.randint(0, 999)
        if kind == "number":
            return r.choice([r.randint(1, 99), r.randint(10, 999) / 10])
        if kind == "boolean":
            return r.random() < 0.5
        if kind == "array":
            return [r.choice(OBJECTS + FRUITS) for _ in range(r.randint(1, 3))]
        return identifier(r)

    def use(r: Rng) -> Use:
        arguments = {key: value(r, kinds[key]) for key in keys}

        def spoken(v: object) -> str:
            if isinstance(v, bool):
                return "true" if v else "false"
            return " and ".join(v) if isinstance(v, list) else str(v)

        pairs = [f"{key} {spoken(v)}" for key, v in arguments.items()]
        listing = pairs[0] if len(pairs) == 1 else ", ".join(pairs[:-1]) + " and " + pairs[-1]
        said = r.choice([f"{verb.capitalize()} the {noun} with {listing}.", f"Please {verb} a {noun} with {listing}.",
                         f"I want to {verb} the {noun}: {listing}.", f"Use {name} with {listing}."])  # fmt: skip
        return Use(said, arguments, r.choice(["ok", "done", '{"status": "ok"}']), f"Done: {verb} {noun}.")

    name = verb + noun.capitalize() if camel else f"{verb}_{noun}"
    description = r.choice(
        [
            f"{verb.capitalize()} a {noun}.",
            f"{verb.capitalize()}s the {noun} of the user",
            f"Use this to {verb} a {noun}.",
        ]
    )
    return Tool(name, description, kinds, keys, use)


KINDS: tuple[typing.Callable[[Rng], Tool], ...] = (
    weather, local_time, calendar, message, mail, timer, calculator, adder, search, translate, lights, heating, shopping,
    order, booking, currency, route, read_file, write_file, shell, dice, nothing,
)  # fmt: skip
#: Kinds whose requests come naturally for several subjects at once.
PAIRABLE = (weather, weather, local_time, timer, read_file, lights, currency, dice)

NO_TOOL = "I have no tool for that."


def draw_kind(r: Rng) -> typing.Callable[[Rng], Tool]:
    """A kind of tool; weather, the example of every tutorial, is drawn more often."""
    x = r.random()
    return weather if x < 0.12 else invented if x < 0.32 else r.choice(KINDS)


def others(r: Rng, kind: object, name: str, most: int) -> list[Tool]:
    """Up to ``most`` tools of other kinds with other names."""
    found: dict[str, Tool] = {}
    for _ in range(r.choice([0, 1, 1, 2, 3, most])):
        k = draw_kind(r)
        if k is not kind or k is invented:
            tool = k(r)
            if tool.name != name:
                found.setdefault(tool.name, tool)
    return list(found.values())


def unused(r: Rng, most: int = 6) -> list[Schema]:
    """Definitions of tools that plain lessons do not need."""
    kinds = r.sample([mail, message, booking, lights, order, currency, route, read_file, write_file, shopping, heating, invented],
                     r.randint(1, most))  # fmt: skip
    return [kind(r).definition(r) for kind in kinds]


def call(r: Rng, w: World) -> Sample:
    """One call, several calls, or the answer after the results."""
    kind = draw_kind(r)
    many = r.random() < 0.16
    if many:
        kind = r.choice(PAIRABLE)
    tool = kind(r)
    uses = [tool.use(r)]
    if many:
        if kind in (weather, local_time):
            uses = _same_question(r, tool, r.choice([2, 2, 3]))
        else:
            uses.append(tool.use(r))
            uses[0] = dataclasses.replace(
                uses[0], said=uses[0].said.rstrip(".?") + " and then " + uses[1].said[0].lower() + uses[1].said[1:]
            )
    available = [tool, *others(r, kind, tool.name, 6)]
    r.shuffle(available)
    definitions = [t.definition(r) for t in available]
    calls = [(tool.name, use.arguments) for use in uses]
    messages = user(uses[0].said)
    core = (tool.name, uses[0].said)
    thought = f"I call {tool.name}." if len(calls) == 1 else f"I call {tool.name} {len(calls)} times."
    if r.random() < 0.3:
        messages += _answered(r, calls, thought, [use.result for use in uses])
        if r.random() < 0.12:
            messages[-1]["content"] = r.choice(["error: not available", "Error: failed", '{"error": "timeout"}'])
            answer = (
                "The tool failed." if len(uses) == 1 else " ".join([u.answer for u in uses[:-1]] + ["The tool failed."])
            )
            return Sample(
                "tool_answer", messages, answer, (*core, "error"), "The tool has answered.", tools=definitions
            )
        results = tuple(use.result for use in uses)
        answer = " ".join(use.answer for use in uses)
        return Sample("tool_answer", messages, answer, (*core, results), "The tool has answered.", tools=definitions)
    return Sample(
        "tool" if len(calls) == 1 else "tools_parallel", messages, "", core, thought, calls=calls, tools=definitions
    )


def _same_question(r: Rng, tool: Tool, n: int) -> list[Use]:
    """``n`` uses of a tool of a city whose first request names all the cities."""
    first = tool.use(r)
    (key, city), *rest = first.arguments.items()
    cities = [city, *r.sample([c for c in CITIES if c != city], n - 1)]
    uses = []
    for c in cities:
        use = tool.use(r)
        was = next(iter(use.arguments.values()))
        uses.append(Use(first.said, {key: c, **dict(rest)}, use.result.replace(was, c), use.answer.replace(was, c)))
    uses[0].said = first.said.replace(city, ", ".join(cities[:-1]) + " and " + cities[-1])
    return uses


def _answered(r: Rng, calls: list[tuple[str, Arguments]], thought: str, results: list[str]) -> list[Message]:
    turn: Message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(calls)
        ],
    }
    if r.random() < 0.5:
        turn["reasoning_content"] = thought
    found = [{"role": "tool", "tool_call_id": f"call_{i}", "content": text} for i, text in enumerate(results)]
    return [turn, *found]


def no_fit(r: Rng, w: World) -> Sample:
    """A request for a tool that is not among those offered."""
    kind = draw_kind(r)
    wanted = kind(r)
    relatives: dict[object, tuple[object, ...]] = {
        local_time: (nothing,),
        nothing: (local_time, dice),
        calculator: (adder,),
        adder: (calculator,),
    }
    kinds = [k for k in KINDS if k is not kind and k not in relatives.get(kind, ())]
    offered = [k(r) for k in r.sample(kinds, r.randint(1, 5))]
    use = wanted.use(r)
    return Sample("tool_refusal", user(use.said), NO_TOOL, ("refuse", wanted.name, use.said), "No tool fits this.",
                  tools=[t.definition(r) for t in offered], may_have_tools=False)  # fmt: skip


def chain(r: Rng, w: World) -> Sample:
    """A second question in a conversation whose first one was answered with a tool."""
    kind = draw_kind(r)
    tool = kind(r)
    first, second = tool.use(r), tool.use(r)
    messages = user(first.said)
    messages += _answered(r, [(tool.name, first.arguments)], f"I call {tool.name}.", [first.result])
    messages += [{"role": "assistant", "content": first.answer}]
    said = second.said
    if kind in (weather, local_time) and len(second.arguments) == 1 and r.random() < 0.4:
        said = f"And in {next(iter(second.arguments.values()))}?"
    messages += user(said)
    available = [tool, *others(r, kind, tool.name, 4)]
    r.shuffle(available)
    return Sample("tool", messages, "", ("chain", tool.name, first.said, said), f"I call {tool.name}.",
                  calls=[(tool.name, second.arguments)], tools=[t.definition(r) for t in available], may_have_history=False)  # fmt: skip
