// Asks a server in the ways of Java's client, which offers HTTP/2 with an Upgrade beside the body.
import java.io.ByteArrayInputStream;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;

public class Client {
    static int ask(HttpClient client, String[] given, HttpRequest.BodyPublisher body, boolean expect) throws Exception {
        HttpRequest request = HttpRequest.newBuilder(URI.create(given[0] + "/v1/queues.info"))
            .header("Authorization", "Bearer " + given[1]).expectContinue(expect).POST(body).build();
        return client.send(request, HttpResponse.BodyHandlers.ofString()).statusCode();
    }

    public static void main(String[] given) throws Exception {
        String body = "{\"queue_name\":\"orders\"}";
        for (HttpClient.Version version : HttpClient.Version.values()) {
            HttpClient client = HttpClient.newBuilder().version(version).build();
            System.out.println("fixed " + ask(client, given, HttpRequest.BodyPublishers.ofString(body), false));
            System.out.println("chunks " + ask(client, given,
                HttpRequest.BodyPublishers.ofInputStream(() -> new ByteArrayInputStream(body.getBytes())), false));
            System.out.println("expect " + ask(client, given, HttpRequest.BodyPublishers.ofString(body), true));
        }
    }
}
