"""Words that the templates are filled with. Data only."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(" ".join(part.split()) for part in text.split(";"))


LANGUAGES = (*("Python",) * 4, "JavaScript", "TypeScript", "Java", "C", "C++", "Go", "Rust", "Ruby")

JOBS = _words(
    """
    reverses a string; checks whether a number is prime; computes the factorial of a number; sorts a
    list of numbers; finds the largest number in a list; counts the vowels of a text; merges two sorted
    lists; prints the Fibonacci series; searches a sorted list by halving; removes duplicates but keeps
    the order; tells whether a word is a palindrome; reads a text file and counts its words; adds up the
    digits of a number; flattens a nested list; turns Celsius into Fahrenheit; finds the greatest common
    divisor; transposes a matrix; checks an email address; reads a CSV file and adds up a column; counts
    how often each word occurs; makes a random password; finds the longest word of a sentence; computes
    mean and median; adds, subtracts, multiplies and divides; tells whether a year is a leap year;
    writes a number in binary; rotates a list by k places; lists all permutations of a word; groups
    words that are anagrams; finds two numbers with a given sum; computes compound interest; walks
    through a tree level by level; finds the shortest path in a maze; removes all punctuation from a
    text; encrypts a text with the Caesar cipher; prints a multiplication table; finds the second
    smallest number; splits a list into chunks; zips two lists into a dictionary; downloads a page and
    prints its title; parses a date and prints the weekday; rounds prices to two places; checks whether
    brackets are balanced; validates a credit card number; converts Roman numerals; shuffles a deck of
    cards; simulates throwing two dice; draws a triangle of stars; renames all files of a folder; finds
    files larger than a megabyte; sends a request and retries on failure; caches the results of a slow
    call; logs messages with a time stamp; reads settings from a JSON file; computes the distance of two
    points; filters a list of people by age; sorts a dictionary by its values; turns snake case into
    camel case; counts the lines of a source file; computes a running total; finds the missing number of
    a series; intersects two sets; evaluates a simple formula; compresses a string by counting runs;
    plays tic-tac-toe
    """
)

STRUCTURES = _words(
    """
    a stack; a queue; a linked list; a binary tree; a hash map; a priority queue; a graph; a trie;
    bubble sort; merge sort; quicksort; insertion sort; binary search; depth-first search; breadth-first
    search; a ring buffer; a least-recently-used cache; a bank account class; a shopping cart class; a
    timer class; an event emitter; a rate limiter; a matrix class; a simple tokenizer; a state machine;
    an iterator over a range; a deque
    """
)

TOPICS = _words(
    """
    photosynthesis; gravity; black holes; the water cycle; machine learning; neural networks; the
    printing press; the French Revolution; the Roman Empire; climate; renewable energy; healthy eating;
    regular exercise; sleep; the solar system; evolution; DNA; the human heart; volcanoes; earthquakes;
    ancient Egypt; democracy; inflation; supply and demand; cryptography; quantum physics; cloud
    computing; meditation; coffee; tea; chocolate; dogs; cats; elephants; whales; bees; rain forests;
    deserts; oceans; mountains; rivers; the moon; Mars; theatre; classical music; jazz; painting;
    photography; poetry; novels; films; board games; chess; football; cycling; swimming; running;
    hiking; gardening; cooking; baking bread; budgets; job interviews; public speaking; languages;
    travel; museums; vaccines; the immune system; stress; friendship; leadership; teamwork; recycling;
    solar panels; wind power; artificial intelligence; robots; space flight; satellites; bridges;
    trains; ships; aeroplanes; electric cars; statistics; probability; geometry; algebra; calculus;
    logic; the brain; memory; dreams; colour; light; sound; electricity; magnets; batteries; plastics;
    glass; steel; paper; clocks; calendars; maps; money; banks; taxes; trade; cities; villages; schools;
    libraries; newspapers; the internet; search engines; databases; programming; open source; video
    games; fashion; architecture; gold; salt; honey; wine; cheese; rice; potatoes; spices; the Silk
    Road; the Vikings; castles; pirates; dinosaurs; fossils; glaciers; hurricanes; clouds; rainbows;
    seasons; tides; coral reefs
    """
)

FIELDS = _words(
    """
    physics; chemistry; biology; economics; psychology; philosophy; astronomy; linguistics; medicine;
    law; engineering; history; geography; sociology; computer science; music theory; art history;
    ecology
    """
)

PEOPLE = _words(
    """
    Anna; Tom; Maria; Ben; Priya; Omar; Lena; Hugo; Mei; Carlos; Nora; Ivan; Zoe; Sam; a teacher; a
    nurse; a baker; a sailor; a student; an old farmer; a young doctor; a detective; a violinist; a
    lighthouse keeper; an astronaut; a carpenter; my boss; my neighbour; my sister; a customer; a new
    colleague
    """
)

PLACES = _words(
    """
    Paris; New York City; a small fishing village; a mountain hut; Tokyo; a night train; an empty
    school; Rome; a busy harbour; a desert town; Istanbul; a greenhouse; a library; Cairo; an island; a
    castle; Lisbon; a workshop; a rainy street; the coast; a space station; Buenos Aires; a market hall;
    the edge of a forest; London
    """
)

MOODS = _words(
    """
    cheerful; sad; funny; formal; short; mysterious; friendly; dramatic; calm; hopeful; romantic;
    encouraging
    """
)

THINGS = _words(
    """
    apples; pens; books; marbles; tickets; eggs; stamps; cookies; chairs; bottles; coins; bricks;
    flowers; balloons; cards
    """
)

WORKS = _words(
    """
    learning a language; baking bread; growing tomatoes; running a marathon; moving house; saving money;
    buying a used car; writing a cover letter; planning a wedding; training a puppy; painting a room;
    repairing a bicycle; making coffee; cooking for many guests; giving a talk; studying for an exam;
    working from home; keeping a diary; packing for a trip; playing the guitar; building a website;
    starting a small business; sleeping better; drinking more water; meditating; reading more books;
    organising a desk; taking photos at night; knitting a scarf; hiking alone; raising chickens
    """
)

PROBLEMS = _words(
    """
    I cannot sleep at night.; My laptop is very slow.; I have an interview tomorrow.; I forgot the
    birthday of my friend.; My plants are dying.; I argue a lot with my brother.; I want to eat less
    sugar.; I have to give a talk next week.; My flight was cancelled.; I feel tired all day.; I spend
    too much time on my phone.; My cat does not eat.; I want to change my job.; My neighbour is very
    loud.; I need a present for my mother.; I keep putting things off.; I have only 30 minutes to cook.;
    I lost my keys.; My son does not like maths.; I want to get fit without a gym.; I am bored on
    Sundays.; I have too many emails.; My bread does not rise.; I want to write a book.; I do not
    understand my electricity bill.; I will move to another country.; I am nervous about an exam.; My
    team misses every deadline.; I want to save for a house.; I have a cold and must work.; I cannot
    remember names.
    """
)

FORMATS = _words(
    """
    a JSON object; a JSON array; JSON; a YAML file; a Markdown table; a CSV file with a header; an XML
    document; a bullet list; a numbered list; an HTML table
    """
)

RECORDS = _words(
    """
    books; films; cities; planets; students; recipes; animals; countries; songs; cars; products of a
    shop; employees; tasks; events; rivers; inventions; bank accounts; flights; football players;
    phones; houses for sale; plants; courses
    """
)

FOREIGN = (
    (
        (
            "Was ist {topic}?",
            "Erkläre {topic} in einfachen Worten.",
            "Schreibe einen kurzen Text über {topic}.",
            "Warum ist {topic} wichtig?",
            "Nenne drei Tatsachen über {topic}.",
            "Schreibe eine kurze Geschichte, in der {topic} vorkommt.",
        ),
        _words(
            """
            das Wasser; der Mond; die Demokratie; das Fahrrad; Musik; der Winter; Brot; Geld; das Herz;
            Schach; das Meer
            """
        ),
    ),
    (
        (
            "Qu'est-ce que c'est, {topic} ?",
            "Explique {topic} à un enfant.",
            "Écris un petit texte sur {topic}.",
            "Pourquoi parle-t-on tant de {topic} ?",
            "Donne trois conseils sur {topic}.",
            "Raconte une histoire courte avec {topic}.",
        ),
        _words(
            """
            la lune; le pain; la mer; la musique; le vélo; la ville; le sommeil; le jardin; l'hiver;
            l'argent; la lecture
            """
        ),
    ),
    (
        (
            "¿Qué es {topic}?",
            "Explica {topic} con palabras sencillas.",
            "Escribe un párrafo sobre {topic}.",
            "¿Por qué es importante {topic}?",
            "Dame tres consejos sobre {topic}.",
            "Escribe un cuento corto con {topic}.",
        ),
        _words(
            """
            la luna; el pan; el mar; la música; la bicicleta; la ciudad; el sueño; el jardín; el
            invierno; el dinero
            """
        ),
    ),
    (
        (
            "Che cos'è {topic}?",
            "Spiega {topic} a un bambino.",
            "Scrivi un breve testo su {topic}.",
            "Dammi tre consigli su {topic}.",
        ),
        _words(
            """
            la luna; il pane; il mare; la musica; la bicicletta; la città; il sonno; il giardino;
            l'inverno; i soldi
            """
        ),
    ),
    (
        (
            "{topic}是什么？",
            "请用简单的话解释{topic}。",
            "写一段关于{topic}的短文。",
            "给我三条关于{topic}的建议。",
        ),
        _words("月亮; 面包; 大海; 音乐; 自行车; 城市; 睡眠; 花园; 冬天; 钱"),
    ),
)
"""For each language its question forms and what they are asked about."""
