"""Everyday adjectives and nouns, of which RULER's keys are made ("quiet-lantern").

RULER takes them from the package wonderwords; these lists are our own, so keys differ from published runs in their words
and not in their form.
"""

from __future__ import annotations

_ADJECTIVES = """
    able ample ancient angry arctic ashen autumnal awake balmy barren bashful bitter black bland bleak blissful blond
    blue blunt bold bony brave brief bright brisk broad broken bronze brown bumpy busy calm candid careful careless
    cautious cheap cheerful chilly civil clean clear clever closed cloudy clumsy coarse cold common complex cool coral
    cordial cosy crisp crooked cruel curious curly curved damp daring dark dear decent deep dense devoted dim distant
    dizzy double drowsy dry dull dusty eager early earnest easy eastern elastic elder elegant empty endless equal even
    exact exotic faded faint fair faithful false famous fancy fatal feeble fertile fierce final fine firm flat flimsy
    floral fluffy foggy foolish formal fragile frail free fresh friendly frosty frozen fruitful full funny fuzzy gentle
    giant gifted glad gleaming gloomy glossy golden good gracious grand grassy grateful grave gray greedy green grim
    handy happy harsh hasty hazy healthy heavy hidden hollow honest huge humble hungry icy ideal idle immense innocent
    intense iron jagged jolly joyful juicy keen kind known large late lazy lean level light likely lively local lofty
    lonely long loose loud lovely loyal lucky lush mad magic major marble mellow merry mighty mild minor misty modern
    modest moist mossy muddy mute naive narrow nearby neat nervous new nimble noble noisy northern novel numb oak oblong
    odd old open oval pale patient peaceful perfect pink plain pleasant polite poor precise pretty prompt proud public
    pure purple quaint quick quiet rainy rapid rare raw ready real red remote rich rigid ripe robust rocky rosy rough
    round royal rude rural rusty sad safe salty sandy scarce secret serene serious shady shallow sharp shiny short shy
    silent silky silly silver simple sincere sleepy slender slim slow small smart smoky smooth snowy soft solar solid
    somber southern spare sparse spicy spiral square stale steady steep sticky stiff stormy stout straight strange strict
    strong sturdy subtle sudden sunny superb sweet swift tall tame tart tender tense thick thin thirsty tidy timid tiny
    tired tough tranquil true trusty twin ugly unique upper urban useful usual vague valid vast velvet violet vital vivid
    warm wary watchful wavy weak wealthy weary western wet white whole wicked wide wild willing windy wise witty wooden
    woolen worthy young zealous
"""

_NOUNS = """
    acorn actor airport album alcove almond alphabet amber anchor angle ankle antler anvil apple apron arbor arch arena
    armor arrow artist atlas attic author avenue badge badger bagel bakery balcony ballad balloon bamboo banana banjo
    banker banner barley barn barrel basin basket bathtub battery beach beacon beaver bell bench berry bicycle birch
    biscuit blanket blossom boat bonfire bonnet border bottle boulder bouquet bowl bracelet branch bread breeze brick
    bridge broom brother brush bubble bucket buckle buffalo bugle building bundle bunker bureau butter butterfly button
    cabbage cabin cactus cake calendar camel camera canal candle canoe canvas canyon captain caravan cargo carpet carrot
    castle catalog cavern cedar cellar cello cement chair chalk chamber channel chapel chapter cherry chess chestnut
    chimney choir cinema circle circus citizen clarinet clay cliff clock closet cloud clover coach coast coat cobbler
    coconut coffee collar colony comet compass concert copper corner cottage cotton cousin cradle crane crater crayon
    cricket crown crystal cupboard curtain cushion cyclist dagger dairy daisy dance dancer deer dentist desert desk
    dessert dialog diamond diary dinner doctor dolphin donkey door dragon drawer dream dress driver drum eagle earring
    easel echo editor elbow elephant elevator ember emblem engine engraver envelope essay evening fabric factory falcon
    farmer feather fence ferry festival fiddle field finger flag flame flask flute foal forest fork fortress fossil
    fountain fox frame freckle freight frost fruit furnace galaxy gallery garage garden garlic garment gate gazelle
    geyser ginger giraffe glacier glass glove goat goblet goose gorge grain grape gravel guitar hallway hammer hammock
    harbor harp harvest hat hazel heart hedge helmet heron hill hinge hockey honey hood horizon horse hotel hour house
    husk iceberg igloo inn insect island ivory ivy jacket jar jasmine jewel jigsaw journal journey judge jungle juniper
    kayak kennel kettle keyboard kingdom kitchen kite kitten knot ladder ladle lagoon lake lamp lantern lark lattice
    laundry leaf ledger lemon lens leopard letter library lighthouse lilac limerick linen lion lizard lobster locket
    lumber lunch machine magnet mailbox mallet mango mantle maple marina market mask mattress meadow medal melody melon
    memory merchant meteor mill mineral mirror mitten monarch monkey moon morning mosaic moss motor mountain museum
    mushroom mustard napkin necklace needle nephew nest nickel night notebook nursery nutmeg oasis ocean office olive
    onion opera orange orbit orchard orchid organ ostrich otter oven owl oyster paddle painter palace palm pancake panda
    panther paper parade parcel parrot pasture path pavement peach peacock peanut pebble pelican pencil penguin pepper
    petal piano pickle picnic picture pier pigeon pillow pilot pine pirate planet plaster plate plaza plum pocket poem
    pond pony poplar porch potato potter prairie prism puddle pumpkin puppet puzzle quarry quartz quill quilt rabbit
    radio raft railway rainbow raven recipe record reef reindeer ribbon rice ridge ring river road robin rocket roof
    rooster rope rose rudder saddle sailor salad salmon salt sandal sapphire satchel saucer sausage scarf school scooter
    sculptor seal season seed shadow shark sheep shelf shell shepherd ship shirt shoe shore shovel shrub signal singer
    sister skeleton sketch sleeve slipper snail soap soldier song sparrow spider spinach spoon squirrel stable stadium
    staircase star statue steam stone stork story stove straw stream street sugar suitcase summer sunset swan sweater
    sword syrup table tailor tangerine tapestry teacher teapot telescope temple tent theater thimble thistle throne
    thunder ticket tiger timber tomato torch tortoise tower tractor train trawler treasure trellis trophy trout trumpet
    tulip tunnel turnip turtle twig umbrella uncle valley vase vessel village vine vineyard violin visitor volcano voyage
    wagon waiter walnut walrus water waterfall wave weaver whale wheat wheel whistle widow willow window winter wizard
    wolf worker wreath writer yacht yard zebra
"""

ADJECTIVES = _ADJECTIVES.split()
NOUNS = _NOUNS.split()
