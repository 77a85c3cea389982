"""Patterns for conversation, questions, numbers, names and announcements (this project's own text)."""

from __future__ import annotations

WORDS = {
    "name": "Anna|Ben|Carla|Daniel|Emily|Frank|Grace|Henry|Isabel|Jack|Karen|Liam|Maria|Nathan|Olivia|Peter|Quinn|"
    "Rachel|Samuel|Teresa|Victor|Wendy|Xavier|Yvonne|Zachary|Alice|Bob|Charlie|Diana|Edward|Fiona|George|Hannah|Ian|"
    "Julia|Kevin|Laura|Michael|Nora|Oscar|Paula|Robert|Sophie|Thomas|Ursula|Vincent|William|Zoe|James|Mary|John|"
    "Elizabeth|David|Jennifer|Richard|Susan|Joseph|Jessica|Sarah|Mark|Steven|Andrew|Emma|Lucas|Mia|Noah|Ethan|Ava|"
    "Priya|Ahmed|Chen|Yuki|Ivan|Fatima|Diego|Ingrid|Omar|Leila|Hiroshi|Elena|Pablo|Mei|Raj|Sven",
    "surname": "Smith|Johnson|Brown|Taylor|Miller|Wilson|Moore|Anderson|Jackson|White|Harris|Martin|Thompson|Garcia|"
    "Martinez|Robinson|Clark|Lewis|Walker|Hall|Allen|Young|King|Wright|Lopez|Hill|Scott|Green|Adams|Baker|Nelson|"
    "Carter|Mitchell|Perez|Roberts|Turner|Phillips|Campbell|Parker|Evans|Edwards|Collins|Stewart|Murphy|Cook|Rogers",
    "place": "London|Paris|Berlin|Tokyo|Chicago|Boston|Seattle|Madrid|Rome|Vienna|Dublin|Sydney|Toronto|Denver|Austin|"
    "Moscow|Cairo|Delhi|Beijing|Lisbon|Oslo|Athens|Prague|Geneva|New York|San Francisco|Los Angeles|Edinburgh|Houston|"
    "Melbourne|Singapore|Amsterdam|Brussels|Istanbul|Nairobi|Santiago|Mexico City|Vancouver|Manchester|Barcelona",
    "country": "France|Germany|Japan|Canada|Brazil|India|China|Spain|Italy|Norway|Greece|Egypt|Kenya|Chile|Mexico|"
    "Australia|Ireland|Scotland|Poland|Sweden|Turkey|Vietnam|Argentina|Portugal|South Korea|the United States",
    "day": "Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday|tomorrow|next week|tonight|this weekend",
    "month": "January|February|March|April|May|June|July|August|September|October|November|December",
    "thing": "book|phone|ticket|map|camera|bicycle|jacket|letter|package|umbrella|key|bottle|lamp|chair|window|table|"
    "door|car|train|boat|guitar|piano|painting|photograph|computer|keyboard|laptop|suitcase|wallet|notebook|pencil|"
    "recipe|cake|sandwich|coffee|blanket|pillow|mirror|clock|basket|hammer|ladder|garden|kitchen|bridge|tower|museum",
    "things": "books|tickets|letters|flowers|apples|oranges|potatoes|eggs|questions|answers|stories|songs|pictures|"
    "cookies|shoes|gloves|windows|candles|stars|clouds|mountains|rivers|trees|birds|horses|dogs|cats|children|friends",
    "place2": "station|airport|hotel|library|bakery|office|hospital|school|park|beach|restaurant|market|theater|bank|"
    "post office|church|castle|harbor|village|forest|lake|square|garage|supermarket|pharmacy|gallery|playground",
    "adj": "old|new|small|large|red|blue|green|quiet|strange|beautiful|broken|heavy|cheap|expensive|lovely|terrible|"
    "wonderful|dangerous|simple|difficult|famous|empty|bright|dark|warm|cold|fresh|dusty|wooden|golden|gentle|clever",
    "feeling": "happy|tired|worried|excited|sorry|glad|sure|afraid|surprised|proud|hungry|thirsty|nervous|curious|"
    "grateful|lonely|angry|calm|confused|delighted",
    "verb": "open|close|find|move|clean|paint|carry|fix|check|bring|sell|borrow|measure|watch|lift|turn|hide|wash|"
    "finish|change|remember|forget|describe|visit|build|choose|draw|explain|improve|protect",
    "activity": "swimming|reading|cooking|dancing|hiking|painting|singing|fishing|gardening|running|skiing|sailing|"
    "traveling|shopping|sleeping|studying|writing|climbing|cycling|practicing",
    "food": "soup|bread|rice|cheese|salad|chicken|pasta|chocolate|honey|butter|fish|pizza|pie|ice cream|tea|juice|"
    "coffee|milk|fruit|vegetables|pancakes|noodles|yogurt",
    "weather": "sunny|cloudy|windy|rainy|foggy|stormy|snowy|freezing|mild|humid|hot and dry|cool and clear",
    "animal": "dog|cat|horse|cow|sheep|rabbit|fox|bear|wolf|lion|tiger|elephant|monkey|eagle|owl|parrot|dolphin|"
    "whale|shark|turtle|frog|mouse|squirrel|penguin|camel|donkey|goose|beetle|butterfly|spider",
    "job": "doctor|teacher|engineer|nurse|farmer|lawyer|pilot|writer|baker|painter|carpenter|scientist|musician|"
    "mechanic|manager|waiter|soldier|student|journalist|photographer|captain|librarian|plumber|electrician",
    "person": "my mother|my father|my sister|my brother|her uncle|his aunt|our neighbor|the teacher|the doctor|"
    "a friend|the captain|the manager|their daughter|his son|the old man|the young woman|everyone|nobody|somebody|"
    "the children",
    "adverb": "quickly|slowly|carefully|quietly|suddenly|always|never|often|usually|hardly ever|gently|finally|easily|"
    "immediately|eventually|recently|simply|exactly|nearly|certainly|probably",
    "tech": "program|server|network|model|screen|button|file|folder|password|message|database|browser|website|robot|"
    "sensor|battery|engine|satellite|microphone|speaker|printer|algorithm|computer|system",
}

PATTERNS = """
Hello, how are you today?
Hello, my name is {name}. It is nice to meet you.
Hi {name}, how was your trip to {place}?
Good morning, {name}. Did you sleep well?
Good evening, and welcome to the {place2}.
Thank you very much for your help, {name}.
Excuse me, where is the nearest {place2}?
Could you tell me how to get to the {place2}?
Can you help me {verb} this {thing}, please?
Would you like some more {food}?
What time does the {place2} open on {day}?
When did you last see the {adj} {thing}?
Why did {person} {verb} the {thing}?
Who left the {adj} {thing} in the {place2}?
Which {thing} do you prefer, the {adj} one or the {adj} one?
How many {things} do we need for {day}?
How much does the {adj} {thing} cost?
Do you know where {name} {surname} lives?
Have you ever been to {country}?
Are you {feeling} about {activity}?
Is there a {place2} near the {place2}?
Should we meet at the {place2} at {time}?
What would you do if the {thing} broke?
Where have all the {things} gone?
I am so {feeling} to see you again!
I think {person} would like to go {activity}.
I don't know what to say about the {thing}.
I've been {activity} since {time} this morning.
I can't believe that {name} bought a {adj} {thing}!
I'd rather stay at home and eat {food}.
I'll call you back in {small} minutes.
I'm going to {place} with {name} in {month}.
I was {feeling} when I heard about the {adj} {thing}.
We're {feeling} that you came to the {place2}.
We should {verb} the {thing} before it rains.
We had {food} and {food} for breakfast.
You don't have to {verb} the {things}.
You never told me that you like {activity}.
You can {adverb} {verb} it if you try.
She said that the {thing} was {adj}, but I didn't believe her.
She works as a {job} in {place}.
She gave {person} a {adj} {thing} for the holidays.
He {adverb} opened the {thing} and looked inside.
He wants to be a {job} when he grows up.
He couldn't {verb} the {thing} without {name}.
They moved from {place} to {place} in {year}.
They saw a {adj} {animal} near the {place2}.
It's been a long day, hasn't it?
It was {weather} when we left the {place2}.
It takes about {number} minutes to reach the {place2}.
"Where are you going?" asked {name}.
"I'm {feeling}," said {name}. "Let's go home."
"Don't {verb} the {thing}!" shouted {person}.
"Yes," she answered {adverb}, "I remember the {animal}."
"No, thank you," said {name}. "I don't eat {food}."
Please {verb} the {thing} and come to the {place2}.
Please {adverb} {verb} the {tech}, and wait for {small} seconds.
Please turn off your {tech} before you enter the {place2}.
Don't worry, {name}. Everything will be fine.
Come here, look at this {adj} {animal}!
Watch out for the {adj} {animal}!
What a {adj} {thing}!
Oh no, I forgot my {thing}!
Well, that was {adj}, wasn't it?
Yes, of course. No problem at all.
No, I don't think so.
Maybe {day}, if the weather is {weather}.
Sure, I'll be there at {time}.
Okay, let's try that again.
Sorry, I didn't hear what you said.
See you {day}, {name}!
Happy birthday, {name}! You are {number} years old today.
Ladies and gentlemen, welcome aboard flight {digits} to {place}.
The next train to {place} leaves from platform {small} at {time}.
Attention please, the {place2} will close in {number} minutes.
Today in {place} it will be {weather}, with a high of {number} degrees.
The temperature fell to {small} degrees below zero in {month}.
Tomorrow will be {weather} in the north and {weather} in the south.
The meeting is on {day}, {month} {ordinal}, at {time}.
The museum was built in {year} by {name} {surname}.
In {year}, about {large} people lived in {place}.
On the {ordinal} of {month}, {year}, the {adj} {place2} burned down.
The price rose from {money} to {money} in {small} days.
That {adj} {thing} costs {money}, which is too much.
About {percent} of the {things} were {adj}.
Sales went up by {percent} last {month}.
The river is {decimal} miles long and {number} feet deep.
Add {small} cups of {food} and {decimal} grams of salt.
The answer is {number}, not {number}.
Room {number} is on the {ordinal} floor, next to the {place2}.
My phone number ends in {digits}.
Your code is {digits}.
Chapter {small}. The {adj} {animal} and the {adj} {thing}.
There were {large} {things} and only {small} {things}.
We counted {number} {things}, {small} {things} and a {thing}.
{name} {surname} won the race in {decimal} seconds.
{name} and {name} ran {small} miles to the {place2}.
{name} {surname} is a {job} from {country}.
{name}, have you met {name} {surname}?
Doctor {surname} will see you at {time}.
Mister {surname} and Missus {surname} are from {country}.
The {tech} sends a {tech} to the {tech} every {small} seconds.
The {tech} stopped working after {number} hours.
This {tech} can {verb} a {thing} in less than {small} seconds.
Click the {adj} {tech} to {verb} the {tech}.
Artificial voices can now read a {thing} aloud.
This is a test of the {adj} {tech}.
The {adj} {animal} jumped over the {adj} {animal}.
The {animal} ran into the {place2}, and the {animal} ran after it.
An {animal} and a {animal} were {adverb} {activity} in the {place2}.
Once upon a time, there was a {adj} {animal} who lived near a {place2}.
The {job} asked the {job} to {verb} the {thing}.
The {job} was {feeling} because the {thing} was {adj}.
After {activity} all day, the {job} felt {feeling} but {feeling}.
If you {verb} the {thing}, the {animal} will be {feeling}.
Although it was {weather}, {person} went {activity}.
Before {time}, {person} had already left for {place}.
Because the {place2} was closed, {name} bought {food} at the {place2}.
While {name} was {activity}, {name} {adverb} hid the {thing}.
First, {verb} the {thing}. Then, {verb} the {thing}. Finally, {verb} the {things}.
Not only the {thing}, but also the {things} were {adj}.
Neither the {job} nor the {job} could {verb} the {tech}.
From {place} to {place}, the journey takes {small} days.
My favorite food is {food}, and I love {activity}.
Both {country} and {country} are known for their {food}.
Let me {verb} that for you.
Let's {verb} the {things} together.
There is nothing {adj} about {activity}.
There are {small} reasons why {person} likes {activity}.
That is the {adj} {thing} that {name} told me about.
These {things} belong to {name}, and those {things} belong to {name}.
This {thing} was made in {country} in {year}.
"""
