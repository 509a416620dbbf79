"""The plots of the stories: what happens, beat by beat, and the ways to tell it. Built in chapter 00."""

from __future__ import annotations

PLOTS: dict[str, list[list[str]]] = {
    "lost": [
        [
            "One day {name} could not find {his} {toy}.",
            "But one <weather> morning the {toy} was gone.",
            "Then something [bad|sad|strange] happened. {name} lost {his} {toy}.",
        ],
        [
            (
                "{he} looked [under the bed|behind the door|in the garden|in every room], but it was not there. "
                '"Where can it be?" {he} [asked|said|wondered].'
            ),
            (
                "{he} searched [all day|for an hour|high and low] and found only [dust|an old shoe|a sleepy "
                "spider|a <colour> button]."
            ),
            '"I must find it before dark," said {name}. {he} [put on {his} coat|took a lantern] and went out.',
        ],
        [
            'On the way {he} met {helper}. "Why are you so <sad>?" asked {helper}. "I lost my {toy}," said {name}.',
            '{friend} heard the news and came at once. "Two pairs of eyes are better than one," said {friend}.',
            (
                '"Think of the last place where you played," said {helper}. '
                "{name} closed {his} eyes and thought [hard|for a long time]."
            ),
        ],
        [
            "Together they walked back along the road. And there, <spot>, lay the {toy}!",
            (
                'At last {name} looked <spot>. "Here it is!" {he} [cried|shouted|laughed]. '
                "The {toy} was [wet|dusty|muddy] but not broken."
            ),
            "Something <colour> was shining <spot>. It was the {toy}. A [bird|dog|gust of wind] had carried it there.",
        ],
        [
            '"Thank you," said {name}, and {he} gave {helper} a <food>.',
            "{name} held the {toy} [tight|close] and [jumped for joy|did not let go of it again].",
            "{name} was so <glad> that {he} [hugged {friend}|sang a song|danced in a circle].",
        ],
    ],
    "friend": [
        [
            (
                "A new family had moved into the house [next door|by the mill|across the road]. "
                "They had a {friend_kind} named {friend}."
            ),
            "One day {name} saw a {friend_kind} sitting alone <spot>. It was {friend}.",
            "There was a new {friend_kind} in the <place>, and nobody talked to {friend}.",
        ],
        [
            '{name} wanted to say hello, but {he} was shy. "What if {friend} does not like me?" {he} thought.',
            '{friend} looked <sad>. "{friend} has no one to play with," thought {name}.',
            "{friend} [hid behind a tree|looked at the ground|did not say a word].",
        ],
        [
            (
                "So {name} took [a <food>|{his} {toy}|a warm blanket] and went over. "
                '"Would you like to [share|play with me|sit with me]?" {he} asked.'
            ),
            "Then {name} had an idea. {he} drew a [picture|map|funny face] and left it at the door of {friend}.",
            '"Hello," said {name} at last. "I know a good place <spot>. Shall I show you?"',
        ],
        [
            '{friend} smiled for the first time. "Yes, please," said {friend}.',
            '"I was hoping someone would ask," said {friend}.',
            'The next day {friend} came to the door with a <food>. "Let us share it," said {friend}.',
        ],
        [
            "They [played|ran|laughed|built things] until the sun went down.",
            "Soon they [knew every path in the <place>|had a secret game|were the best of friends].",
            "After that, no one ever saw the one without the other.",
        ],
    ],
    "storm": [
        [
            (
                "One night a great storm came. The wind [howled|roared|shook the roof] and the rain "
                "[fell in sheets|beat on the windows]."
            ),
            (
                "In the afternoon the sky turned dark. [Thunder rolled over the hills.|The first drops fell, "
                "big and cold.|All the birds went quiet.]"
            ),
        ],
        [
            '{name} heard <sound> outside. "Someone is out there," {he} said.',
            "Through the window {name} saw {friend} [standing in the rain|hiding under a cart|lost in the dark].",
            "The river rose higher and higher, and {friend} was on the other side.",
        ],
        [
            (
                "{name} was afraid, but {he} [took a lantern|tied a rope around {his} waist|put on {his} boots] "
                "and opened the door."
            ),
            '"I am small, but I can be brave," said {name}, and {he} ran [into the rain|down the path|to the bridge].',
            "{he} called the neighbours. They [made a chain of hands|brought ropes and lamps|came at once].",
        ],
        [
            '"Hold on to me!" called {name}. Step by step they made their way [home|back|to the warm kitchen].',
            "It took a long time, but in the end everyone was safe inside.",
            '"This way!" {name} shouted, and swung the light until {friend} saw it.',
        ],
        [
            "They sat by the fire, drank [hot tea|warm milk|a bowl of soup], and listened to the storm go away.",
            "In the morning the sun came out, and the whole world [smelled of wet grass|shone like glass].",
            '"You saved me," said {friend}. "You would do the same," said {name}.',
        ],
    ],
    "garden": [
        [
            "One spring {name} planted a <plant> seed <spot>.",
            '{helper} gave {name} a single seed. "Take good care of it," said {helper}.',
            "{name} wanted to grow the [biggest|finest|sweetest] <plant> in the <place>.",
        ],
        [
            (
                "{he} watered it every day and [sang to it|pulled out the weeds|built a small fence]. "
                "But nothing [came up|happened]."
            ),
            'Days went by. "Why does it not grow?" asked {name}. "Be patient," said {helper}.',
            'The others laughed. "You are watering dirt," said {friend}. But {name} did not give up.',
        ],
        [
            "Then, one <weather> morning, there was a tiny green leaf.",
            "After <count> weeks a leaf pushed through the earth, no bigger than a [fingernail|button|bean].",
            "At last the earth cracked, and something green looked out.",
        ],
        [
            (
                "It grew [and grew|taller every day|past the fence and over the wall], "
                "until it was [as tall as {name}|higher than the roof|the pride of the street]."
            ),
            "The rain helped, and the sun helped, and the [bees|worms|birds] helped too.",
        ],
        [
            (
                "In the autumn there was enough for [everyone|the whole <place>|a feast], "
                "and {name} shared it [gladly|with all the neighbours|even with those who had laughed]."
            ),
            '"What is your secret?" asked {friend}. "I waited," said {name}.',
            "{name} kept one seed for next year and gave one to {friend}.",
        ],
    ],
    "honest": [
        [
            (
                "One afternoon {name} was playing with a ball in the house. "
                "Crash! The <colour> [vase|bowl|lamp] fell to the floor."
            ),
            "While no one was looking, {name} ate the whole <food> that was meant for {friend}.",
            "{name} borrowed the {toy} of {friend} and broke it.",
        ],
        [
            "{name} hid the pieces <spot>. {his} [heart beat fast|hands were cold|face was hot].",
            (
                '"Maybe no one will notice," thought {name}. But {he} [could not sleep|did not feel like '
                "playing|felt a stone in {his} stomach]."
            ),
            '"It was the wind," said {name} when they asked. But the words tasted bad.',
        ],
        [
            "All evening {he} thought about it.",
            '{name} asked {helper} what to do. "A small truth is lighter than a big secret," said {helper}.',
            "The next day {friend} looked so <sad> that {name} could not bear it.",
        ],
        [
            '"It was me," said {name} in a small voice. "I am sorry."',
            "{name} took a deep breath and told [everything|the whole story|the truth].",
        ],
        [
            '"Thank you for telling me," said {friend}. "We can fix it together."',
            (
                "{friend} was [angry for a moment|quiet for a while], but then [{friend} nodded|they shook "
                "hands|they laughed]."
            ),
            "They [glued the pieces together|baked a new one|worked all afternoon], and it was almost as good as new.",
        ],
    ],
    "journey": [
        [
            (
                "{name} had always wanted to see [the sea|what was behind the hills|the big city|the place where "
                "the river begins]."
            ),
            "One day {name} found {treasure} <spot>. On it was written: go north.",
            'A letter came for {name}. It said: "Come [at once|before the snow|when the moon is full]. I need you."',
        ],
        [
            (
                "So {he} packed [a loaf of bread and a <thing>|<count> apples and a map|a <colour> blanket] and "
                "set off [at dawn|before anyone was awake|with {friend}]."
            ),
            '"It is far," said {helper}. "I have strong legs," said {name}.',
            "The road was long. It went through the [forest|fields|hills] and over [a stone bridge|<count> streams].",
        ],
        [
            "At night {he} slept [under the stars|in a barn|under a big tree] and heard <sound>.",
            (
                "On the second day a river blocked the way. {name} [built a raft|waited for a boat|found a fallen "
                "tree] and crossed it."
            ),
            "{he} met {helper}, who [shared a fire|pointed out the way|told {him} about the road ahead].",
        ],
        [
            (
                "At last {he} [climbed the last hill|came around the last bend], and there it was. "
                "It was even [bigger|more beautiful|brighter] than {he} had dreamed."
            ),
            "After <count> days {name} arrived. {friend} [ran out to meet {him}|was already waiting by the gate].",
        ],
        [
            "{name} stayed for <count> days and then went home with {treasure} in {his} pocket.",
            '"Was it worth it?" they asked later. "Every step," said {name}.',
            "{he} sat there [quietly|for a long time] and looked until the sun went down.",
        ],
    ],
    "race": [
        [
            "Every summer there was a [race|contest|boat race] in the <place>. {name} wanted to win.",
            '"I am faster than you," said {friend}. "We will see," said {name}.',
            "The prize was a <colour> <thing>, and everyone wanted it.",
        ],
        [
            "{name} practised [every day|before breakfast|up and down the hill].",
            "The day of the race was <weather>. {helper} rang the bell, and off they went.",
            "At first {friend} was far ahead. {name} [did not stop|breathed slowly|kept going].",
        ],
        [
            "Then, near the end, {friend} [tripped and fell|hurt a foot|got stuck in the mud].",
            "Halfway there, {name} heard someone cry. It was {friend}, [lying in the grass|sitting by the road].",
        ],
        [
            "{name} could see the finish. But {he} [turned around|stopped|ran back].",
            '"Go on," said {friend}. "You can win!" But {name} shook {his} head.',
        ],
        [
            (
                '"Lean on me," said {name}. Slowly they walked to the end, side by side. '
                "They were the last, and everybody [clapped|cheered]."
            ),
            "They did not win the <thing>. They won something better.",
            "{helper} [cut the prize in two|gave them both a <food>|said it was the best race in years].",
        ],
    ],
    "night": [
        [
            "One night {name} heard <sound>. It came from [the attic|the cellar|the old well|the garden].",
            "{name} was afraid of the dark. Every shadow looked like a [monster|giant|wolf].",
            "In the middle of the night {name} woke up. Something went tap, tap, tap.",
        ],
        [
            '{he} pulled the blanket over {his} head. "Go away," {he} whispered.',
            'The sound came [again|closer]. "Who is there?" asked {name}, but no one answered.',
            "{name} [held {his} breath|counted to ten|lit a candle]. Then {he} [got up|tiptoed to the door].",
        ],
        [
            "Step by step {he} went [down the stairs|along the hall|to the window]. The floor creaked.",
            "{friend} had heard it too. They held hands and went to look.",
            "{his} heart beat like a drum, but {he} opened the door.",
        ],
        [
            "And what did {he} see? It was only [a kitten|a branch|a loose shutter|a hungry mouse|a lost owl]!",
            (
                "There sat a tiny [kitten|bird|mouse], [wet and cold|looking up with big eyes]. "
                '"Was that you?" laughed {name}.'
            ),
        ],
        [
            "{name} gave it [some milk|a crumb of bread|a warm place to sleep].",
            "After that, the dark was only the dark.",
            '"Next time I will look first and be afraid later," said {name}.',
        ],
    ],
    "gift": [
        [
            "It was almost the birthday of {friend}, and {name} had no present and no money.",
            "{name} wanted to give {friend} something [special|that no one else could give|from the heart].",
        ],
        [
            "In the shop there was a <colour> <thing>, but it cost <count> coins.",
            '"What does {friend} like most of all?" {name} asked {helper}.',
            "{name} looked in {his} pockets and found only [a string|a button|half a cookie].",
        ],
        [
            "So {he} [worked for the baker|carried water|swept the yard|picked berries] for <count> days.",
            "Then {he} had an idea. {he} took [wood and paint|paper and glue|<colour> wool] and began to make a {toy}.",
            "{he} worked [late into the night|in secret|until {his} fingers hurt].",
        ],
        [
            "On the big day {name} gave the present to {friend} with [a shy smile|both hands|a pounding heart].",
            (
                "{friend} opened it slowly. Inside was a {toy}, [a little crooked|painted <colour>|with the name "
                "of {friend} on it]."
            ),
        ],
        [
            '"It is the best present of all," said {friend}, "because you made it for me."',
            "{friend} [hugged {name}|could not speak|danced around the room].",
            "They [ate cake|played with it|sat together] until the evening.",
        ],
    ],
}
