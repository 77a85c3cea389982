A="talker.stream_priority=high codec.first_chunks=ahead"
V="@c=32,gather=1,pad=0 @c=32,gather=1 @c=32,gather=2 @c=32,gather=3 @c=32,gather=4 @c=32,gather=3,lead_s=0.1 @c=32,gather=6,lead_s=0.1 @c=32,gather=4,lead_s=0.06 @c=32,gather=3,lead_s=0.1,in_flight=1 @c=32,gather=1,pad=0 @c=64,gather=1,pad=0 @c=64,gather=1 @c=64,gather=4 @c=64,gather=4,lead_s=0.1 @c=64,gather=8,lead_s=0.1"
timeout 200 python3 gpu_churn.py dummy:1.7b-customvoice $A $V > $OUT/churn.txt 2>&1; grep "^result" $OUT/churn.txt; tail -1 $OUT/churn.txt | cut -c1-300; echo at $SECONDS
timeout 50 python3 gpu_lim.py 10 2>&1 | tail -1
timeout 50 python3 gpu_lim.py 3 2>&1 | tail -1
echo at $SECONDS
cd $OUT; tar czf all.tgz *; ls | grep -v all.tgz | xargs rm -r
